"""The shipped tasks are what their page says: bytes, commits, and a gold patch that makes exactly the listed tests pass."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from xml.etree import ElementTree

import pytest

from orchestrator.tasks.folder import check_task_folder
from orchestrator.tasks.snapshot import Snapshot
from orchestrator.tasks.source import load_tasks

EXAMPLES = Path(__file__).parent.parent.parent / "examples" / "tasks"
OFFLINE = "offline__wordcount-1"
REAL = {
    "xmltodict__xmltodict-0.14.2": {
        "commit": "7680777f46915599ff4628d2f0ccc266525c1f65",
        "tree": "815926e1891c54a4b4c96acd7cbef9991f7c708e",
        "files": 10,
        "gold": (844, "b7c9fde55683568b"),
        "test": (821, "d96d7feb7d5e3cec"),
        "lists": (2, 58),
    },
    "pathspec__pathspec-0.12.1": {
        "commit": "e8374160d8812e412bb10288f6405b18b3fb190b",
        "tree": "00b2074dc1ec1633c4e77f5ae3496c202aeeeaef",
        "files": 32,
        "gold": (453, "607402cc586feb84"),
        "test": (8968, "dcf9072edc2a410c"),
        "lists": (1, 118),
    },
}


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def tasks(cache_dir):
    loaded = load_tasks(EXAMPLES, cache_dir=cache_dir)
    if any("could not be downloaded" in refusal.reason for refusal in loaded.refused):
        pytest.skip(f"no package index: {loaded.refused[0].reason}")
    assert loaded.refused == []
    return {task.instance_id: task for task in loaded.tasks}


def unpacked(task, folder: Path) -> Path:
    source = task.repo_source
    if source.kind == "archive":
        with tarfile.open(source.path) as tar:
            tar.extractall(folder, filter="data")
    else:
        subprocess.run(["cp", "-r", f"{source.path}/.", folder], check=True)
    return folder


def run_tests(task, repo, out) -> dict[str, bool]:
    """Run the strict command and return test id -> passed."""
    # This interpreter may know a fixed pathspec; pytest puts the repository before it, and the failing tests show so.
    report = out / "junit.xml"
    report.unlink(missing_ok=True)
    subprocess.run(
        [sys.executable, "-I", "-B", "-m", "pytest", "-rA", "-p", "no:cacheprovider", "-c", os.devnull,
         "--noconftest", f"--rootdir={repo}", "-o", f"pythonpath={repo}", "-o", "junit_family=xunit1",
         f"--junitxml={report}", *task.targets],
        cwd=repo, env={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PATH": os.defpath}, capture_output=True, check=False,
        timeout=50,
    )  # fmt: skip
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        file, name = case.attrib["file"], case.attrib["name"]
        classes = case.attrib["classname"].removeprefix(file.removesuffix(".py").replace("/", ".")).strip(".")
        test_id = "::".join([file, *(part for part in classes.split(".") if part), name])
        found[test_id] = not any(child.tag in {"failure", "error", "skipped"} for child in case)
    return found


def apply(patch, repo) -> None:
    subprocess.run(
        ["git", "apply", "-"],
        cwd=repo,
        input=patch,
        check=True,
        env={"GIT_CEILING_DIRECTORIES": str(repo.parent)},
    )


@pytest.mark.parametrize("instance_id", REAL)
def test_a_real_task_is_derived_byte_for_byte(tasks, instance_id, tmp_path):
    task, facts = tasks[instance_id], REAL[instance_id]
    tree = unpacked(task, tmp_path / "tree")
    base = Snapshot(tree, tmp_path / "git")
    assert base.commit == task.base_commit == facts["commit"]
    shown = subprocess.run(
        ["git", f"--git-dir={base.git_dir}", "rev-parse", "HEAD^{tree}"],
        capture_output=True,
        check=True,
        text=True,
    )
    assert shown.stdout.strip() == facts["tree"]
    assert len(base.files()) == facts["files"]
    for patch, expected in ((task.gold_patch, facts["gold"]), (task.test_patch, facts["test"])):
        assert (len(patch), hashlib.sha256(patch).hexdigest()[:16]) == expected
    assert (len(task.fail_to_pass), len(task.pass_to_pass)) == facts["lists"]


@pytest.mark.parametrize("instance_id", [*REAL, OFFLINE])
def test_gold_solves_a_task_and_nothing_less_does(tasks, instance_id, tmp_path):
    task = tasks[instance_id]
    assert task.strict
    repo = unpacked(task, tmp_path / "repo")
    apply(task.test_patch, repo)
    before = run_tests(task, repo, tmp_path)
    apply(task.gold_patch, repo)
    after = run_tests(task, repo, tmp_path)
    assert {test_id for test_id, passed in before.items() if not passed} == set(task.fail_to_pass)
    assert {test_id for test_id, passed in before.items() if passed} == set(task.pass_to_pass)
    assert all(after.values())
    assert after.keys() == before.keys()


@pytest.mark.parametrize("instance_id", [*REAL, OFFLINE])
def test_a_shipped_folder_passes_the_static_check(tasks, cache_dir, instance_id):
    assert check_task_folder(EXAMPLES / instance_id, cache_dir=cache_dir, python=Path(sys.executable)) == []


def test_the_offline_task_loads_without_an_index(cache_dir, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    loaded = load_tasks(EXAMPLES / OFFLINE, cache_dir=cache_dir, python=Path("/nonexistent/python"))
    assert [task.instance_id for task in loaded.tasks] == [OFFLINE]


def test_without_an_index_the_offline_task_still_runs_and_the_others_say_why(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    real = next(iter(REAL))
    for name in (OFFLINE, real):
        shutil.copytree(EXAMPLES / name, tmp_path / "tasks" / name)
    loaded = load_tasks(tmp_path / "tasks", cache_dir=tmp_path / "cache")
    assert [task.instance_id for task in loaded.tasks] == [OFFLINE]
    assert [refusal.instance_id for refusal in loaded.refused] == [real]
    assert "could not be downloaded" in loaded.refused[0].reason


def test_no_line_of_the_packages_is_kept_in_the_repository():
    for name in REAL:
        assert sorted(
            path.name for path in (EXAMPLES / name).iterdir() if not path.name.startswith("turns")
        ) == [
            "problem_statement.md",
            "task.yaml",
            "tests.json",
        ]
