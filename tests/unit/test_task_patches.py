from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from orchestrator.tasks.patches import patch_paths, reverse_patch
from orchestrator.tasks.snapshot import Snapshot

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def repository(tmp_path):
    tree = tmp_path / "tree"
    (tree / "pkg").mkdir(parents=True)
    (tree / "pkg" / "a.py").write_text("".join(f"line {n}\n" for n in range(40)))
    (tree / "no_newline.txt").write_text("first\nlast")
    (tree / "crlf.txt").write_bytes(b"one\r\ntwo\r\n")
    (tree / "gone.txt").write_text("-- looks like a header\nx\n")
    (tree / "run.sh").write_text("#!/bin/sh\n")
    (tree / "with space.txt").write_text("a\n")
    (tree / "ümlaut.txt").write_text("a\n")
    return Snapshot(tree, tmp_path / "git")


def change_everything(tree: Path) -> None:
    lines = (tree / "pkg" / "a.py").read_text().splitlines(keepends=True)
    lines[3:5] = ["changed\n"]
    lines.insert(20, "added\n")
    del lines[30]
    (tree / "pkg" / "a.py").write_text("".join(lines))
    (tree / "no_newline.txt").write_text("first\nlast\n")
    (tree / "crlf.txt").write_bytes(b"one\r\nTWO\r\n")
    (tree / "gone.txt").unlink()
    (tree / "new.txt").write_text("++ looks like a header\nno newline")
    (tree / "run.sh").chmod(0o755)
    (tree / "with space.txt").write_text("b\n")
    (tree / "ümlaut.txt").write_text("b\n")


def content(tree: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path.relative_to(tree)): (path.read_bytes(), path.stat().st_mode & 0o100)
        for path in tree.rglob("*")
        if path.is_file()
    }


def apply(tree: Path, patch: bytes) -> None:
    subprocess.run(
        ["git", "apply", "-"], cwd=tree, input=patch, check=True, env={"GIT_CEILING_DIRECTORIES": "/"}
    )


def test_a_reversed_patch_undoes_the_patch_under_git(repository):
    before = content(repository.tree)
    change_everything(repository.tree)
    after = content(repository.tree)
    patch = repository.diff()
    reverse = reverse_patch(patch)
    assert reverse is not None
    apply(repository.tree, reverse)
    assert content(repository.tree) == before
    apply(repository.tree, patch)
    assert content(repository.tree) == after


def test_reversing_twice_gives_the_same_patch(repository):
    change_everything(repository.tree)
    patch = repository.diff()
    reverse = reverse_patch(patch)
    assert reverse is not None
    assert reverse_patch(reverse) == patch
    assert b"old mode 100755\nnew mode 100644\n" in reverse


def test_every_path_of_a_patch_is_found(repository):
    change_everything(repository.tree)
    (repository.tree / "empty.txt").touch()
    assert sorted(path.decode() for path in patch_paths(repository.diff())) == sorted(
        ["pkg/a.py", "no_newline.txt", "crlf.txt", "gone.txt", "new.txt", "run.sh", "with space.txt", "ümlaut.txt",
         "empty.txt"]
    )  # fmt: skip


def test_a_binary_change_or_a_rename_is_not_reversed(repository):
    (repository.tree / "image.png").write_bytes(b"\x00\x01\x02" * 50)
    assert reverse_patch(repository.diff()) is None
    assert reverse_patch(b"diff --git a/x b/y\nsimilarity index 100%\nrename from x\nrename to y\n") is None


def test_a_removed_line_that_looks_like_a_header_names_no_file():
    patch = b"diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1,2 +1 @@\n--- /etc/passwd\n y\n"
    assert patch_paths(patch) == [b"x"]


def test_a_patch_without_its_last_line_end_is_reversed_all_the_same():
    patch = b"diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b"
    assert reverse_patch(patch) == b"diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-b\n+a\n"
