from __future__ import annotations

import json
import subprocess
import sys
import venv
from typing import Any

import pytest

from orchestrator.tasks.source import load_tasks

CHANGED = "diff --git a/{0} b/{0}\n--- a/{0}\n+++ b/{0}\n@@ -1 +1 @@\n-a\n+b\n"
ADDED = "diff --git a/{0} b/{0}\nnew file mode 100644\n--- /dev/null\n+++ b/{0}\n@@ -0,0 +1 @@\n+b\n"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def classic(repo: str, version: str, test_patch: str) -> dict[str, Any]:
    return {
        "instance_id": repo.replace("/", "__") + "-1",
        "repo": repo,
        "version": version,
        "base_commit": COMMIT,
        "problem_statement": "Fix it.",
        "test_patch": test_patch,
        "FAIL_TO_PASS": '["tests/test_a.py::test_x"]',
        "PASS_TO_PASS": "[]",
    }


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    scripted = classic("owner/scripted", "1", CHANGED.format("tests/test_a.py")) | {
        "eval_script": ": '>>>>> Start Test Output'\npytest\n: '>>>>> End Test Output'\n"
    }
    records = [
        classic("psf/requests", "2.4", CHANGED.format("tests/test_a.py")),
        classic("pallets/flask", "2.3", ADDED.format("tests/test_new.py")),
        classic("owner/unknown", "1.0", CHANGED.format("tests/test_a.py")),
        scripted,
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory):
    """An interpreter without any package."""
    folder = tmp_path_factory.mktemp("bare") / "env"
    venv.create(folder, with_pip=False)
    return folder / "bin" / "python"


def test_without_the_extra_a_classic_row_is_refused_and_the_extra_is_named(rows, tmp_path, bare_python):
    loaded = load_tasks(rows, cache_dir=tmp_path, python=bare_python)
    assert [task.instance_id for task in loaded.tasks] == ["owner__scripted-1"]
    assert [refusal.where for refusal in loaded.refused] == [f"{rows}:{n}" for n in (1, 2, 3)]
    assert all('pip install "areal-sweagent[swebench]"' in refusal.reason for refusal in loaded.refused)


def test_a_release_that_knows_no_scripts_is_named(rows, tmp_path, bare_python):
    site = next(bare_python.parent.parent.glob("lib/python3*/site-packages"))
    package = site / "swebench"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '5.9'\n")
    try:
        loaded = load_tasks(rows, cache_dir=tmp_path, python=bare_python)
    finally:
        (package / "__init__.py").unlink()
    assert len(loaded.refused) == 3
    assert "swebench 5.9 no longer knows any" in loaded.refused[0].reason


def test_an_interpreter_that_does_not_start_is_a_refusal(rows, tmp_path):
    loaded = load_tasks(rows, cache_dir=tmp_path, python=tmp_path / "nowhere")
    assert "cannot be started" in loaded.refused[0].reason


def test_the_package_is_never_imported_here():
    assert "swebench" not in sys.modules


@pytest.fixture(scope="session")
def swebench_python(pytestconfig):
    """An environment of its own with the real package, made once and kept in pytest's cache folder."""
    folder = pytestconfig.cache.mkdir("swebench") / "env"
    python, complete = folder / "bin" / "python", folder / "complete"
    if complete.exists():
        return python
    venv.create(folder, with_pip=True, clear=True)
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "swebench>=4,<5"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"swebench cannot be installed: {done.stderr[-300:]}")
    complete.touch()
    return python


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_classic_row_gets_its_script_and_parser_from_the_real_package(rows, tmp_path, swebench_python):
    loaded = load_tasks(rows, cache_dir=tmp_path, python=swebench_python)
    tasks = {task.instance_id: task for task in loaded.tasks}
    assert set(tasks) == {"psf__requests-1", "pallets__flask-1", "owner__scripted-1"}
    changed = tasks["psf__requests-1"].eval_script or ""
    assert changed.startswith("#!/bin/bash\nset -uxo pipefail\n")
    assert changed.count(f"git checkout {COMMIT} tests/test_a.py\n") == 2
    assert changed.index(">>>>> Start Test Output") < changed.index("pytest -rA tests/test_a.py")
    assert tasks["psf__requests-1"].log_parser == "parse_log_pytest_options"
    # A checkout without paths would undo the patch under test.
    assert "git checkout" not in (tasks["pallets__flask-1"].eval_script or "")
    assert [refusal.instance_id for refusal in loaded.refused] == ["owner__unknown-1"]
