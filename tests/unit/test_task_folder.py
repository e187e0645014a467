from __future__ import annotations

import json
import os
import sys
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from orchestrator import errors
from orchestrator.tasks.folder import check_task_folder, read_task_folder
from orchestrator.tasks.snapshot import commit_of

if TYPE_CHECKING:
    from orchestrator.tasks.record import Task

DIFF = b"diff --git a/t.py b/t.py\n--- a/t.py\n+++ b/t.py\n@@ -1 +1 @@\n-old\r\n+new \xff\n"


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "owner__repo-1"
    (path / "repo").mkdir(parents=True)
    (path / "repo" / "t.py").write_text("old\n")
    (path / "task.yaml").write_text(
        "instance_id: owner__repo-1\nstrict: true\ntargets: [tests]\nlicence: MIT\n"
    )
    (path / "problem_statement.md").write_text("Fix it.\n")
    (path / "tests.json").write_text(json.dumps({"FAIL_TO_PASS": ["t.py::x"], "PASS_TO_PASS": ["t.py::y"]}))
    (path / "gold.patch").write_bytes(DIFF)
    (path / "test.patch").write_bytes(DIFF)
    return path


def read(folder: Path) -> Task:
    return read_task_folder(folder, cache_dir=folder.parent / "cache", python=Path(sys.executable))


def reasons(folder: Path) -> list[str]:
    return check_task_folder(folder, cache_dir=folder.parent / "cache", python=Path(sys.executable))


def test_a_folder_gives_a_local_task_with_its_bytes_untouched(folder):
    (folder / "test_assets" / "data").mkdir(parents=True)
    (folder / "test_assets" / "data" / "blob.bin").write_bytes(b"\x00\xff")
    task = read(folder)
    assert task.dataset_kind == "local"
    assert task.workdir == "/testbed"
    assert task.gold_patch == task.test_patch == DIFF
    assert task.test_assets == {"data/blob.bin": b"\x00\xff"}
    assert task.repo_source is not None
    assert (task.repo_source.kind, task.repo_source.path) == ("tree", folder / "repo")
    assert task.extra == {"licence": "MIT"}
    assert reasons(folder) == []


def test_a_folder_with_an_archive_states_the_commit_that_the_archive_gives(folder):
    with tarfile.open(folder / "repo.tar.gz", "w:gz") as tar:
        tar.add(folder / "repo" / "t.py", "t.py")
    commit = commit_of(folder / "repo.tar.gz")
    assert commit == commit_of(folder / "repo")
    yaml = (folder / "task.yaml").read_text()
    (folder / "task.yaml").write_text(yaml + f"base_commit: {commit}\n")
    assert reasons(folder) == []
    source = read(folder).repo_source
    assert source is not None
    assert source.kind == "archive"
    (folder / "task.yaml").write_text(yaml + f"base_commit: {'f' * 40}\n")
    assert reasons(folder) == [f"base_commit is {'f' * 40}, but repo.tar.gz gives {commit}"]


def add(name: str, text: str):
    return lambda folder: (folder / name).write_text((folder / name).read_text() + text)


def put(name: str, data: bytes):
    return lambda folder: (folder / name).write_bytes(data)


def link(name: str):
    def change(folder):
        (folder / name).unlink(missing_ok=True)
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).symlink_to("/etc/hostname")

    return change


def fifo(folder):
    (folder / "eval.sh").unlink(missing_ok=True)
    os.mkfifo(folder / "eval.sh")


BROKEN = {
    "no task.yaml": (lambda folder: (folder / "task.yaml").unlink(), "there is no task.yaml"),
    "task.yaml is a list": (put("task.yaml", b"- a\n"), "holds a list"),
    "task.yaml is broken": (put("task.yaml", b"a: [\n"), "no valid YAML in line 2"),
    "task.yaml is nested without end": (put("task.yaml", b"[" * 1_500), "task.yaml"),
    "task.yaml is not UTF-8": (put("task.yaml", b"a: \xff\n"), "not UTF-8"),
    "task.yaml makes objects": (
        put("task.yaml", b"a: !!python/object/apply:os.getcwd []\n"),
        "no valid YAML",
    ),
    "task.yaml uses an alias": (put("task.yaml", b"a: &x [1]\nb: *x\n"), "alias"),
    "task.yaml holds the lists": (add("task.yaml", "FAIL_TO_PASS: [a]\n"), "belongs in a file of its own"),
    "version is a date": (add("task.yaml", "released: 2024-01-01\n"), "date"),
    "lists are text": (
        put("tests.json", b'{"FAIL_TO_PASS": "[\\"a\\"]"}'),
        "FAIL_TO_PASS in tests.json is a text",
    ),
    "tests.json is broken": (put("tests.json", b"{"), "tests.json: not valid JSON"),
    "tests.json is a list": (put("tests.json", b"[]"), "tests.json holds a list"),
    "tests.json has another key": (put("tests.json", b'{"F2P": []}'), "unknown key F2P"),
    "no tests.json": (lambda folder: (folder / "tests.json").unlink(), "FAIL_TO_PASS is empty"),
    "no statement": (lambda folder: (folder / "problem_statement.md").unlink(), "problem_statement"),
    "test patch leaves the repository": (
        put("test.patch", DIFF.replace(b"t.py", b"../t.py")),
        "test.patch touches",
    ),
    "gold patch leaves the repository": (
        put("gold.patch", DIFF.replace(b"t.py", b"../t.py")),
        "gold.patch touches",
    ),
    "gold patch is none": (put("gold.patch", b"hello\n"), "gold.patch is no git patch"),
    "a named file is a link": (link("gold.patch"), "gold.patch cannot be read"),
    "an asset is a link": (link("test_assets/x"), "x cannot be read"),
    "a named file is a fifo": (fifo, "eval.sh is no regular file"),
}


@pytest.mark.parametrize(
    ("change", "reason"), BROKEN.values(), ids=[name.replace(" ", "-") for name in BROKEN]
)
def test_a_broken_task_folder_is_refused_with_the_reason(folder, change, reason):
    change(folder)
    with pytest.raises(errors.RecordRefused) as caught:
        read(folder)
    assert reason in str(caught.value)
    assert len(reasons(folder)) == 1


def test_an_eval_script_without_both_markers_is_refused(folder):
    (folder / "task.yaml").write_text("instance_id: a\n")
    (folder / "eval.sh").write_text(": '>>>>> Start Test Output'\npytest\n")
    with pytest.raises(errors.RecordRefused, match="lacks a marker"):
        read(folder)
    (folder / "eval.sh").write_text(": '>>>>> Start Test Output'\npytest\n: '>>>>> End Test Output'\n")
    assert read(folder).eval_script is not None


def test_an_archive_with_another_digest_than_stated_is_refused(folder):
    (folder / "repo.tar.gz").write_bytes(b"x")
    add("task.yaml", f"sha256: {'0' * 64}\n")(folder)
    with pytest.raises(errors.RecordRefused, match=r"repo\.tar\.gz has sha256"):
        read(folder)


def test_what_a_person_must_still_add_is_listed(folder):
    (folder / "gold.patch").unlink()
    (folder / "repo" / "t.py").unlink()
    (folder / "repo").rmdir()
    assert [reason.split(",")[0] for reason in reasons(folder)] == [
        "there is no gold.patch",
        "there is neither repo.tar.gz nor repo/",
    ]
