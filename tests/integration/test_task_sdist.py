from __future__ import annotations

import hashlib
import io
import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from orchestrator import errors
from orchestrator.tasks import sdist, snapshot

PYTHON = Path(sys.executable)
SETUP = (
    "import pathlib\npathlib.Path({marker!r}).touch()\nfrom setuptools import setup\nsetup(name='demo-pkg')\n"
)


def build_sdist(folder: Path, version: str, body: str, *, marker: Path) -> str:
    """Write a source distribution whose setup.py would leave a trace, and return its sha256."""
    files = {
        "PKG-INFO": f"Metadata-Version: 2.1\nName: demo-pkg\nVersion: {version}\n",
        "setup.py": SETUP.format(marker=str(marker)),
        "demo.py": f"def answer():\n    return {body}\n",
        "tests/test_demo.py": f"import demo\n\n\ndef test_answer():\n    assert demo.answer() == {body}\n",
        "demo_pkg.egg-info/PKG-INFO": f"Version: {version}\n",
        "tests/__pycache__/test_demo.pyc": version,
    }
    folder.mkdir(exist_ok=True)
    path = folder / f"demo_pkg-{version}.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(f"demo_pkg-{version}/{name}")
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder that pip takes for its only package index."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return tmp_path / "index"


@pytest.fixture
def marker(tmp_path):
    return tmp_path / "setup-was-run"


@pytest.fixture
def block(index, marker):
    return {
        "package": "demo-pkg",
        "buggy": {"version": "1.0", "sha256": build_sdist(index, "1.0", "41", marker=marker)},
        "fixed": {"version": "1.1", "sha256": build_sdist(index, "1.1", "42", marker=marker)},
        "gold_files": ["demo.py"],
        "test_files": ["tests/test_demo.py"],
    }


@pytest.fixture
def seeded(block, index, tmp_path):
    """The same block, its releases already in the cache, so that pip has nothing to do."""
    for release in (block["buggy"], block["fixed"]):
        folder = tmp_path / "cache" / "sdists" / release["sha256"]
        folder.mkdir(parents=True)
        shutil.copy(index / f"demo_pkg-{release['version']}.tar.gz", folder)
    return block


def derive(block, tmp_path, **changes) -> sdist.Derived:
    return sdist.derive(
        sdist.parse_source(block | changes),
        instance_id="demo-1.1",
        cache_dir=tmp_path / "cache",
        python=PYTHON,
    )


def test_tree_and_patches_come_from_two_releases_and_none_of_their_code_runs(block, tmp_path, marker):
    derived = derive(block, tmp_path)
    with tarfile.open(derived.archive) as tar:
        assert tar.getnames() == ["demo.py", "setup.py", "tests/test_demo.py"]
    assert b"-    return 41\n+    return 42\n" in derived.gold_patch
    assert b"tests/test_demo.py" in derived.test_patch
    assert b"tests/test_demo.py" not in derived.gold_patch
    assert b" a/demo.py" not in derived.test_patch
    assert derived.base_commit == snapshot.commit_of(derived.archive)
    assert derived.archive_sha256 == hashlib.sha256(derived.archive.read_bytes()).hexdigest()
    assert not marker.exists()


def test_a_damaged_download_in_the_cache_is_fetched_again(seeded, tmp_path):
    kept = next((tmp_path / "cache" / "sdists" / seeded["buggy"]["sha256"]).iterdir())
    kept.write_bytes(b"half a file")
    assert derive(seeded, tmp_path).gold_patch
    assert hashlib.sha256(kept.read_bytes()).hexdigest() == seeded["buggy"]["sha256"]


def test_the_second_time_needs_no_index(block, tmp_path, index):
    first = derive(block, tmp_path)
    for path in index.iterdir():
        path.unlink()
    assert derive(block, tmp_path) == first


def test_a_changed_cache_entry_is_made_again(seeded, tmp_path):
    first = derive(seeded, tmp_path)
    (first.archive.parent / "gold.patch").write_bytes(b"other")
    assert derive(seeded, tmp_path) == first


def test_another_source_block_gets_another_cache_entry(seeded, tmp_path):
    first = derive(seeded, tmp_path)
    other = derive(seeded, tmp_path, gold_files=["demo.py", "setup.py"])
    assert other.archive.parent != first.archive.parent


def test_a_release_with_other_bytes_than_pinned_is_refused(block, tmp_path, marker):
    with pytest.raises(errors.RecordRefused, match=r"demo-pkg 1\.0 could not be downloaded"):
        derive(block, tmp_path, buggy={"version": "1.0", "sha256": "0" * 64})
    assert not marker.exists()
    assert list((tmp_path / "cache" / "tasks").glob("[!.]*")) == []


def test_without_an_index_the_reason_is_given_and_the_next_step(block, tmp_path, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(errors.RecordRefused, match="could not be downloaded") as caught:
        derive(block, tmp_path)
    assert "offline" in caught.value.hint


def test_releases_that_do_not_differ_in_the_named_files_are_refused(seeded, tmp_path):
    with pytest.raises(errors.RecordRefused, match=r"gold\.patch is empty"):
        derive(seeded, tmp_path, gold_files=["setup.py"])


WRONG = {
    "no block": 5,
    "path climbs": {"gold_files": ["../x"]},
    "option as package": {"package": "--index-url=x"},
    "option as version": {"buggy": {"version": "1 --hash", "sha256": "0" * 64}},
    "version is a number": {"buggy": {"version": 1.1, "sha256": "0" * 64}},
    "short digest": {"buggy": {"version": "1.0", "sha256": "abc"}},
    "unknown key": {"fix": 1},
    "no gold files": {"gold_files": []},
}


@pytest.mark.parametrize("change", WRONG.values(), ids=[name.replace(" ", "-") for name in WRONG])
def test_a_wrong_source_block_is_refused(block, change):
    with pytest.raises(errors.RecordRefused):
        sdist.parse_source(block | change if isinstance(change, dict) else change)


@pytest.mark.slow
def test_processes_that_start_at_once_share_one_entry_and_leave_no_litter(block, tmp_path):
    program = (
        "import json, sys\nfrom pathlib import Path\nfrom orchestrator.tasks import sdist\n"
        "block, cache = json.loads(sys.argv[1]), Path(sys.argv[2])\n"
        "print(sdist.derive(sdist.parse_source(block), instance_id='demo', cache_dir=cache, python=Path(sys.executable)))"
    )
    arguments = [sys.executable, "-c", program, json.dumps(block), str(tmp_path / "cache")]
    root = Path(__file__).parent.parent.parent
    running = [subprocess.Popen(arguments, cwd=root, stdout=subprocess.PIPE, text=True) for _ in range(6)]
    answers = [process.communicate(timeout=50)[0] for process in running]
    assert [process.returncode for process in running] == [0] * 6
    assert len(set(answers)) == 1
    assert list((tmp_path / "cache").rglob(".new-*")) == []


def test_what_a_killed_process_left_behind_is_removed(seeded, tmp_path):
    folder = derive(seeded, tmp_path).archive.parent
    left = folder.parent / f".new-{folder.name}-killed"
    left.mkdir()
    (folder / "manifest.json").unlink()
    derive(seeded, tmp_path)
    assert not left.exists()
