from __future__ import annotations

import subprocess

import pytest

from orchestrator.errors import GradeOutcome
from orchestrator.grading import commands, validate
from orchestrator.grading.base import Evidence, Grade
from orchestrator.tasks.record import DatasetKind, Task

MARKED = "echo before\n: '>>>>> Start Test Output'\n{}\n: '>>>>> End Test Output'\necho after\n"
F, P = "t.py::fixed", "t.py::kept"


def task(**changes) -> Task:
    record = {
        "instance_id": "t", "dataset_kind": DatasetKind.LOCAL, "workdir": "/testbed", "problem_statement": "x",
        "fail_to_pass": (F,), "pass_to_pass": (P,), "gold_patch": b"+++ b/pkg/a.py\n+++ b/setup.py\n+++ b/README\n",
    }  # fmt: skip
    return Task(**(record | changes))


@pytest.mark.parametrize(
    ("changes", "mode"),
    [
        ({"strict": True, "eval_script": "true"}, "strict"),
        ({"f2p_script": "x", "f2p_mode": "place"}, "listed"),
        ({"f2p_script": "x", "f2p_mode": "execute"}, "execute"),
        ({"eval_script": MARKED.format("true")}, "marked_script"),
        ({"eval_script": "true"}, "script"),
        ({"eval_script": ": '>>>>> Start Test Output'\ntrue\n"}, "script"),
        ({"expected_status": {"a": "PASSED"}}, "marked_script"),
        ({}, "listed"),
        ({"fail_to_pass": ()}, "none"),
    ],
)
def test_the_record_decides_how_it_is_tested(changes, mode):
    assert commands.choose_mode(task(**changes)) == mode


def test_the_strict_command_keeps_the_repository_off_the_interpreters_path():
    command = commands.build(
        task(strict=True, import_roots=("src", ".")), "/w d", start_nonce="s", end_nonce="e"
    )
    assert command.argv[4:9] == ("-I", "-B", "-m", "pytest", "-rA")
    assert "pythonpath='/w d/src' '/w d'" in command.argv
    assert {"--noconftest", "/dev/null", "--rootdir=/w d", "t.py"} <= set(command.argv)
    assert command.env == {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    allowed = commands.build(
        task(strict=True, allow_conftest=("tests/conftest.py",)), "/w", start_nonce="", end_nonce=""
    )
    assert "--confcutdir=/w/tests" in allowed.argv
    assert "--noconftest" not in allowed.argv


@pytest.mark.parametrize(
    ("test", "status"), [("true", 0), ("(exit 3)", 3), ("set -e\nfalse", 1), ("cat <<'E'\n: '>>>>> x'\nE", 0)]
)
def test_a_framed_script_exits_with_the_status_of_its_tests(test, status):
    framed = commands.frame_tests("set -eux\n" + MARKED.format(test), "NONCE1", "NONCE2")
    done = subprocess.run(["bash", "-c", framed], capture_output=True, text=True, check=False)
    lines = done.stdout.split("\n")
    assert lines[0] == "before"
    assert "after" not in lines
    if "set -e\n" not in test:
        assert (done.returncode, lines[-2]) == (status, "NONCE2")
    assert lines.index("NONCE1") > 0


def grade(outcome: str, f: str = "PASSED", p: str = "PASSED", **more: str) -> Grade:
    return Grade(outcome=GradeOutcome(outcome), evidence=Evidence.JUNIT, tests={F: f, P: p, **more})


@pytest.mark.parametrize(
    ("gold", "noop", "origin", "reason"),
    [
        ([grade("resolved")], [grade("unresolved", "FAILED")], "/testbed/pkg/__init__.py", None),
        ([grade("unresolved", "FAILED")], [grade("unresolved", "FAILED")], "/testbed/a", "gold is unresolved"),
        ([grade("resolved")], [grade("resolved")], "/testbed/a", "the no-op patch is resolved"),
        ([grade("resolved")], [grade("unresolved", "PASSED", "FAILED")], "/testbed/a", "FAIL_TO_PASS passes without"),
        ([grade("resolved")], [grade("unresolved", "FAILED", "FAILED")], "/testbed/a", "PASS_TO_PASS fails without"),
        ([grade("resolved")], [grade("tests_timeout")], "/testbed/a", "the no-op patch is tests_timeout"),
        ([grade("resolved")], [grade("unresolved", "FAILED")], "/usr/lib/pkg/__init__.py", "is imported from /usr/lib"),
        ([grade("resolved")], [grade("unresolved", "FAILED")], "/testbed-2/pkg.py", "is imported from"),
        ([grade("resolved"), grade("unresolved", "FAILED")], [grade("unresolved", "FAILED")], "/testbed/a", "flaky: t.py::fixed"),
        ([], [grade("unresolved", "FAILED")], "/testbed/a", "the gold patch was not graded"),
        ([grade("resolved")], [], "/testbed/a", "the no-op patch was not graded"),
    ],
)  # fmt: skip
def test_a_task_is_valid_only_when_it_tells_a_fix_from_none(gold, noop, origin, reason):
    report = validate.compare(task(), gold=gold, noop=noop, origins={"pkg": origin}, workdir="/testbed")
    if reason is None:
        assert report.valid
    else:
        assert any(reason in text for text in report.reasons), report.reasons


def test_failures_outside_the_lists_with_gold_are_the_known_ones():
    graded = [grade("resolved", **{"t.py::old": "FAILED", "t.py::ok": "PASSED"})]
    report = validate.compare(
        task(), gold=graded, noop=[grade("unresolved", "FAILED")], origins={}, workdir="/w"
    )
    assert report.known_failing == ["t.py::old"]


def test_tested_modules_are_the_packages_that_gold_changes():
    assert validate.tested_modules(task()) == ["pkg"]
    assert validate.tested_modules(
        task(gold_patch=b"+++ b/src/lib/x.py\n+++ b/top.py\n", import_roots=("src",))
    ) == ["lib"]
    assert validate.tested_modules(task(gold_patch=None)) == []
