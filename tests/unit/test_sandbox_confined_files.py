"""Reading and writing through hostile links never leaves the mounts."""

from __future__ import annotations

import os

import pytest

from orchestrator.sandbox.confined_files import ConfinedFiles
from orchestrator.sandbox.isolation import Mount


@pytest.fixture
def work(tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "host").mkdir()
    (tmp_path / "host" / "secret").write_text("secret")
    return tmp_path / "work"


@pytest.fixture
def files(tmp_path, work):
    (tmp_path / "system").mkdir()
    (tmp_path / "system" / "tool").write_text("tool")
    return ConfinedFiles(
        [
            Mount(inside="/repo", outside=str(work), writable=True),
            Mount(inside="/usr", outside=f"{tmp_path}/system"),
            Mount(inside="/etc/passwd", outside=f"{tmp_path}/host/secret"),
        ],
        [("/bin", "usr")],
    )


def test_an_absolute_link_is_resolved_inside(files, work, tmp_path):
    (work / "in").write_text("in")
    (work / "near").symlink_to("/repo/in")
    (work / "far").symlink_to(tmp_path / "host" / "secret")
    assert files.read("/repo/near", 10) == b"in"
    with pytest.raises(FileNotFoundError):
        files.read("/repo/far", 10)
    with pytest.raises(FileNotFoundError):
        files.write("/repo/far", b"x", 0o644)
    assert (tmp_path / "host" / "secret").read_text() == "secret"


@pytest.mark.parametrize(
    "target", ["../host/secret", "../../../../../../..", "../work/../host/secret", "/.."]
)
def test_climbing_out_ends_at_the_sandbox_root(files, work, target):
    (work / "climb").symlink_to(target)
    for path in ("/repo/climb", "/repo/climb/host/secret", "/repo/../host/secret", "/../host/secret"):
        with pytest.raises((FileNotFoundError, IsADirectoryError)):
            files.read(path, 10)


def test_a_linked_directory_on_the_way_is_resolved_inside(files, work, tmp_path):
    (work / "way").symlink_to(tmp_path / "host")
    (work / "real").mkdir()
    (work / "ok").symlink_to("real")
    with pytest.raises(FileNotFoundError):
        files.write("/repo/way/secret", b"x", 0o644)
    files.write("/repo/ok/new/file", b"x", 0o600)
    assert (work / "real" / "new" / "file").read_bytes() == b"x"
    assert (tmp_path / "host" / "secret").read_text() == "secret"


def test_links_in_a_circle_are_an_error_and_not_a_hang(files, work):
    (work / "a").symlink_to("b")
    (work / "b").symlink_to("a")
    with pytest.raises(OSError, match="symbolic links"):
        files.read("/repo/a", 10)


def test_system_files_can_be_read_through_root_links_but_not_written(files):
    assert files.read("/usr/tool", 10) == b"tool"
    assert files.read("/bin/tool", 10) == b"tool"
    assert files.read("/etc/passwd", 10) == b"secret"
    for path in ("/usr/tool", "/bin/new", "/etc/passwd", "/etc/new", "/repo", "/"):
        with pytest.raises((PermissionError, FileNotFoundError, IsADirectoryError)):
            files.write(path, b"x", 0o644)


def test_special_files_are_no_files(files, work):
    os.mkfifo(work / "fifo")
    (work / "folder").mkdir()
    for path in ("/repo/fifo", "/repo/folder", "/repo/fifo/x", "/repo"):
        with pytest.raises((FileNotFoundError, IsADirectoryError)):
            files.read(path, 10)


def test_a_write_replaces_in_one_step_and_leaves_no_scraps(files, work):
    (work / "file").write_text("old")
    kept = (work / "file").open()
    files.write("/repo/file", b"new", 0o755)
    with kept:
        assert kept.read() == "old"
    assert (work / "file").stat().st_mode & 0o777 == 0o755
    (work / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        files.write("/repo/folder", b"x", 0o644)
    assert sorted(p.name for p in work.iterdir()) == ["file", "folder"]


def test_the_limit_is_exact(files, work):
    (work / "five").write_text("12345")
    assert files.read("/repo/five", 5) == b"12345"
    with pytest.raises(ValueError, match="larger than 4"):
        files.read("/repo/five", 4)


@pytest.mark.parametrize("path", ["relative", "/repo/\0", ""])
def test_only_absolute_paths_have_a_meaning(files, path):
    with pytest.raises(ValueError, match="absolute"):
        files.read(path, 10)
