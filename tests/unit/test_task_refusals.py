from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator import errors
from orchestrator.tasks.dialects import normalise

DIFF = "diff --git a/t.py b/t.py\n--- a/t.py\n+++ b/t.py\n@@ -1 +1 @@\n-old\n+new\n"
MARKED = ": '>>>>> Start Test Output'\npytest\n: '>>>>> End Test Output'\n"


def record(**changes) -> dict[str, Any]:
    base = {
        "instance_id": "owner__repo-1",
        "repo": "owner/repo",
        "problem_statement": "Fix it.",
        "FAIL_TO_PASS": ["t.py::x"],
        "PASS_TO_PASS": ["t.py::y"],
    }
    return {key: value for key, value in (base | changes).items() if value != "ABSENT"}


def r2e(**changes) -> dict[str, Any]:
    return {
        "repo_name": "r",
        "commit_hash": "0" * 40,
        "problem_statement": "p",
        "FAIL_TO_PASS": None,
    } | changes


def areal(**changes) -> dict[str, Any]:
    return {"instance_id": "a", "problem_statement": "p", "eval_script": "exit 0"} | changes


REFUSED = {
    "no id": (record(instance_id="ABSENT"), "instance_id"),
    "empty id": (record(instance_id="  "), "instance_id"),
    "id is a number": (record(instance_id=7), "instance_id is a number"),
    "id with a line end": (record(instance_id="a\nb"), "not printable"),
    "endless id": (record(instance_id="a" * 201), "longer than"),
    "no statement": (record(problem_statement="ABSENT"), "problem_statement"),
    "empty statement": (record(problem_statement=" \n"), "problem_statement"),
    "statement between empty tags": (
        record(problem_statement="[ISSUE] [/ISSUE]"),
        "problem_statement is empty",
    ),
    "statement is a number": (record(problem_statement=5), "problem_statement is a number"),
    "statement is a list of numbers": (record(problem_statement=[1]), "problem_statement is a number"),
    "f2p absent": (record(FAIL_TO_PASS="ABSENT"), "FAIL_TO_PASS is empty"),
    "f2p null": (record(FAIL_TO_PASS=None), "FAIL_TO_PASS is empty"),
    "f2p empty text": (record(FAIL_TO_PASS=""), "FAIL_TO_PASS is empty"),
    "f2p empty list": (record(FAIL_TO_PASS=[]), "FAIL_TO_PASS is empty"),
    "f2p empty JSON list": (record(FAIL_TO_PASS="[]"), "FAIL_TO_PASS is empty"),
    "f2p broken JSON": (record(FAIL_TO_PASS='["a", "b'), "neither a JSON list nor a Python list"),
    "f2p code": (
        record(FAIL_TO_PASS="__import__('os').listdir('/')"),
        "neither a JSON list nor a Python list",
    ),
    "f2p comprehension": (
        record(FAIL_TO_PASS="['a' for _ in 'bc']"),
        "neither a JSON list nor a Python list",
    ),
    "f2p with a comma forgotten": (record(FAIL_TO_PASS="['a' 'b']"), "neither a JSON list nor a Python list"),
    "f2p is a number": (record(FAIL_TO_PASS=3), "FAIL_TO_PASS is a number"),
    "f2p is an object": (record(FAIL_TO_PASS='{"a": 1}'), "FAIL_TO_PASS is a JSON object"),
    "f2p holds a number": (record(FAIL_TO_PASS=["a", 1]), "an item of FAIL_TO_PASS is a number"),
    "f2p text holds a number": (record(FAIL_TO_PASS='["a", 1]'), "an item of FAIL_TO_PASS is a number"),
    "f2p holds a list": (record(FAIL_TO_PASS=[["a"]]), "an item of FAIL_TO_PASS is a list"),
    "f2p holds an empty id": (record(FAIL_TO_PASS=["a", " "]), "empty text"),
    "f2p literal nested without end": (record(FAIL_TO_PASS="['a', " + "[" * 100_000), "neither a JSON list"),
    "f2p JSON nested without end": (record(FAIL_TO_PASS="[" * 100_000), "neither a JSON list"),
    "f2p names a test twice": (record(FAIL_TO_PASS=["t.py::x", "t.py::x"]), "t.py::x twice"),
    "id in both lists": (record(PASS_TO_PASS=["t.py::x"]), "t.py::x is in FAIL_TO_PASS and in PASS_TO_PASS"),
    "p2p broken": (record(PASS_TO_PASS="oops"), "PASS_TO_PASS is neither"),
    "known failing broken": (record(KNOWN_FAILING=5), "KNOWN_FAILING is a number"),
    "workdir relative": (record(workdir="repo"), "workdir is repo"),
    "workdir climbs": (record(workdir="/a/../b"), "workdir is /a/../b"),
    "workdir is the root": (record(workdir="/"), "workdir is /"),
    "workdir is a list": (record(workdir=["/a"]), "workdir is a list"),
    "workdir with a line end": (record(workdir="/a\nb"), "workdir"),
    "target climbs": (record(targets=["../x"]), "targets names ../x"),
    "target absolute": (record(targets=["/x"]), "targets names /x"),
    "import root climbs": (record(import_roots=["a/../../b"]), "import_roots names"),
    "NUL in the statement": (record(problem_statement="a\0b"), "problem_statement contains a NUL"),
    "NUL in a test id": (record(FAIL_TO_PASS=["a\0"]), "FAIL_TO_PASS contains a NUL"),
    "NUL in a list text": (record(FAIL_TO_PASS='["a\\u0000"]'), "FAIL_TO_PASS contains a NUL"),
    "NUL in a patch": (record(test_patch=DIFF + "\0"), "test_patch contains a NUL"),
    "NUL deep in an unknown key": (record(extra_data={"a": [{"b": "\0"}]}), "extra_data.a.b contains a NUL"),
    "half a surrogate pair": (record(problem_statement="\ud800"), "surrogate"),
    "nested too deeply": (record(other=json.loads("[" * 60 + "]" * 60)), "nested more than"),
    "not a number": (record(other=float("nan")), "nan"),
    "an integer of 30 digits": (record(other=10**30), "beyond 64 bits"),
    "a date": (record(other=datetime.date(2024, 1, 1)), "date"),
    "unknown kind": (record(dataset_kind="swefoo"), "dataset_kind swefoo is unknown"),
    "unknown parser": (record(log_parser="parse_log_cobol"), "log_parser parse_log_cobol"),
    "parser as source": (record(parser="def parse(log):\n    return {}\n"), "log_parser def parse"),
    "unknown nested parser": (record(install_config={"log_parser": "nope"}), "log_parser nope"),
    "nested parser is a number": (record(install_config={"log_parser": 5}), "install_config.log_parser"),
    "unknown eval_type": (record(eval_type="some"), "eval_type"),
    "unknown f2p_mode": (record(f2p_script="x", f2p_mode="guess"), "f2p_mode"),
    "strict is text": (record(strict="yes"), "strict is yes"),
    "timeout is text": (record(timeout_s="60"), "timeout_s is 60"),
    "timeout is negative": (record(timeout_s=-1), "timeout_s is -1"),
    "timeout is a boolean": (record(timeout_s=True), "timeout_s is True"),
    "timeout is a century": (record(timeout_s=3e9), "timeout_s"),
    "base commit is a word": (record(base_commit="main"), "base_commit main"),
    "test patch is no patch": (record(test_patch="hello"), "test_patch is no git patch"),
    "test patch leaves the repository": (record(test_patch=DIFF.replace("t.py", "../t.py")), "../t.py"),
    "test patch writes into .git": (record(test_patch=DIFF.replace("t.py", ".git/hooks/x")), ".git/hooks/x"),
    "test patch without binary content": (
        record(test_patch="diff --git a/x.png b/x.png\nBinary files a/x.png and b/x.png differ\n"),
        "binary files differ",
    ),
    "repo_path is missing": (record(repo_path="nowhere"), "repo_path nowhere is no folder"),
    "repo_archive is missing": (record(repo_archive="nowhere.tar"), "repo_archive nowhere.tar is no file"),
    "repo_path of endless length": (record(repo_path="x" * 5000), "repo_path"),
    "sha256 of the archive is short": (record(repo_archive_sha256="abc"), "repo_archive_sha256 abc"),
    "r2e map is empty": (r2e(expected_output_json="{}"), "expected_output_json is empty"),
    "r2e map is broken": (r2e(expected_output_json='{"a": '), "not valid JSON"),
    "r2e map is a list": (r2e(expected_output_json='["a"]'), "expected_output_json"),
    "r2e status is a number": (r2e(expected_output_json='{"a": 1}'), "expected_output_json holds"),
    "r2e expects nothing to pass": (r2e(expected_output_json='{"a": "FAILED"}'), "FAIL_TO_PASS is empty"),
    "areal without anything to grade by": (
        areal(eval_script=None, dataset_kind="areal"),
        "FAIL_TO_PASS is empty",
    ),
    "areal with only tests that pass before": (areal(PASS_TO_PASS=["a"]), "FAIL_TO_PASS is empty"),
    "marked script without lists": (areal(eval_script=MARKED), "FAIL_TO_PASS is empty"),
    "marked script without lists, named areal": (
        areal(eval_script=MARKED, dataset_kind="areal"),
        "FAIL_TO_PASS is empty",
    ),
    "f2p_script to place without lists": (
        areal(eval_script=None, dataset_kind="slime", f2p_script="def test_x(): pass"),
        "FAIL_TO_PASS is empty",
    ),
}


@pytest.mark.parametrize(
    ("row", "reason"), REFUSED.values(), ids=[name.replace(" ", "-") for name in REFUSED]
)
def test_a_record_that_cannot_be_graded_is_refused_with_the_reason(row, reason):
    with pytest.raises(errors.RecordRefused) as caught:
        normalise(row, base_dir=Path("/nowhere"))
    assert reason in str(caught.value)
    assert "\0" not in str(caught.value)


def test_the_record_that_these_tests_break_is_fine_as_it_is():
    assert normalise(record(), base_dir=Path("/nowhere")).fail_to_pass == ("t.py::x",)


def test_a_huge_value_is_not_repeated_in_the_message():
    with pytest.raises(errors.RecordRefused) as caught:
        normalise(record(FAIL_TO_PASS="x" * 1_000_000), base_dir=Path("/nowhere"))
    assert len(str(caught.value)) < 200


def test_a_list_without_a_script_exit_code_is_enough_for_areal_even_when_it_is_given_empty():
    assert normalise(areal(FAIL_TO_PASS="[]"), base_dir=Path("/nowhere")).fail_to_pass == ()
