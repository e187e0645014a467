from __future__ import annotations

import pytest

from orchestrator.grading.pytest_log import parse_pytest_log

SUMMARY = "=========== short test summary info ============"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("PASSED tests/a.py::test_x", {"tests/a.py::test_x": "PASSED"}),
        ("PASSED tests/a.py::test_x[a - b]", {"tests/a.py::test_x[a - b]": "PASSED"}),
        ("FAILED tests/a.py::test_x - assert 1 == 2", {"tests/a.py::test_x": "FAILED"}),
        ("FAILED tests/a.py::test_x[a - b] - no", {"tests/a.py::test_x[a - b]": "FAILED"}),
        ("ERROR tests/a.py - ImportError: no", {"tests/a.py": "ERROR"}),
        ("XFAIL tests/a.py::test_x - reason", {"tests/a.py::test_x": "XFAIL"}),
        ("SUBFAILED(i=0) tests/a.py::C::test_x - no", {"tests/a.py::C::test_x": "FAILED"}),
        ("SUBFAILED[one] tests/a.py::test_x - no", {"tests/a.py::test_x": "FAILED"}),
        ("SKIPPED [1] tests/a.py:26: because", {}),
        ("PASSED", {}),
        (" PASSED tests/a.py::test_x", {}),
        ("PASSEDtests/a.py::test_x", {}),
        ("\x1b[32mPASSED\x1b[0m tests/a.py::\x1b[1mtest_x\x1b[0m\r", {"tests/a.py::test_x": "PASSED"}),
    ],
)
def test_a_line_gives_a_status_or_nothing(line, expected):
    assert parse_pytest_log(line) == expected


def test_lines_that_tests_print_before_the_summary_decide_nothing():
    log = f"PASSED t.py::test_x\nFAILED t.py::test_z\n{SUMMARY}\nPASSED t.py::test_y\nFAILED t.py::test_x - no\n"
    assert parse_pytest_log(log) == {"t.py::test_y": "PASSED", "t.py::test_x": "FAILED"}


def test_a_pass_printed_after_the_summary_does_not_undo_a_failure():
    assert parse_pytest_log(f"{SUMMARY}\nFAILED t.py::test_x - no\nPASSED t.py::test_x\n") == {
        "t.py::test_x": "FAILED"
    }


def test_without_a_summary_the_last_line_for_an_id_counts():
    assert parse_pytest_log("FAILED t.py::test_x\nPASSED t.py::test_x\n") == {"t.py::test_x": "PASSED"}


def test_verbose_lines_count_only_in_their_flavour():
    line = "t.py::test_x[a b] PASSED   [ 50%]"
    assert parse_pytest_log(line) == {}
    assert parse_pytest_log(line, "pytest_v2") == {"t.py::test_x[a b]": "PASSED"}


@pytest.mark.parametrize(
    ("printed", "node_id"),
    [
        ("t.py::test_x[/some/machine/file.txt]", "t.py::test_x[/file.txt]"),
        ("t.py::test_x[//host/path]", "t.py::test_x[//host/path]"),
        ("t.py::test_x[/a/*]", "t.py::test_x[/a/*]"),
        ("t.py::test_x[a/b]", "t.py::test_x[a/b]"),
    ],
)
def test_options_that_are_paths_are_shortened_in_their_flavour(printed, node_id):
    assert parse_pytest_log(f"PASSED {printed}", "pytest_options") == {node_id: "PASSED"}
