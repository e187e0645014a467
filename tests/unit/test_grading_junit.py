from __future__ import annotations

import pytest

from orchestrator.grading import junit

CASE = '<testcase classname="{0}" name="{1}" file="{2}">{3}</testcase>'


def suite(
    *cases: str, tests: int | None = None, failures: int = 0, errors: int = 0, skipped: int = 0
) -> bytes:
    count = len(cases) if tests is None else tests
    head = f'<testsuite tests="{count}" failures="{failures}" errors="{errors}" skipped="{skipped}">'
    return f'<?xml version="1.0"?><testsuites>{head}{"".join(cases)}</testsuite></testsuites>'.encode()


@pytest.mark.parametrize(
    ("classname", "name", "file", "node_id"),
    [
        ("tests.test_a", "test_x", "tests/test_a.py", "tests/test_a.py::test_x"),
        ("tests.test_a.C", "test_x", "tests/test_a.py", "tests/test_a.py::C::test_x"),
        ("tests.test_a.C.D", "test_x[a b]", "tests/test_a.py", "tests/test_a.py::C::D::test_x[a b]"),
        ("test_a", "test_x[c\\d.e::f]", "test_a.py", "test_a.py::test_x[c\\d.e::f]"),
        ("", "collection failure", "", "collection failure"),
    ],
    ids=["function", "class", "nested class and blank", "backslash, dot and colons", "nothing but a name"],
)
def test_a_test_id_is_rebuilt_from_file_class_and_name(classname, name, file, node_id):
    report = junit.parse_junit(suite(CASE.format(classname, name, file, "")))
    assert report.tests == {node_id: "PASSED"}


def test_a_test_inherited_from_another_file_keeps_the_id_of_its_own_class():
    inherited = CASE.format("tests.test_a.C", "test_x", "tests/base.py", "")
    listed = junit.parse_junit(suite(inherited), ["tests/test_a.py::C::test_x"])
    assert listed.tests == {"tests/test_a.py::C::test_x": "PASSED"}
    beside = junit.parse_junit(suite(inherited, CASE.format("tests.test_a", "test_y", "tests/test_a.py", "")))
    assert beside.tests["tests/test_a.py::C::test_x"] == "PASSED"


@pytest.mark.parametrize(
    ("child", "status"),
    [
        ('<failure message="no"/>', "FAILED"),
        ('<error message="no"/>', "ERROR"),
        ('<skipped type="pytest.skip"/>', "SKIPPED"),
        ('<skipped type="pytest.xfail"/>', "XFAIL"),
        ("<system-out>FAILED</system-out>", "PASSED"),
        ('<failure message="no"/><error message="no"/>', "ERROR"),
    ],
)
def test_the_children_of_a_case_give_its_status(child, status):
    report = junit.parse_junit(suite(CASE.format("t", "x", "t.py", child)))
    assert report.tests == {"t.py::x": status}


def test_of_two_cases_with_one_id_the_worse_counts():
    failed = CASE.format("t", "x", "t.py", "<failure/>")
    passed = CASE.format("t", "x", "t.py", "")
    for cases in ((failed, passed), (passed, failed)):
        assert junit.parse_junit(suite(*cases, failures=1)).tests == {"t.py::x": "FAILED"}


@pytest.mark.parametrize(
    ("report", "agree"),
    [
        (suite(CASE.format("t", "x", "t.py", "")), True),
        (suite(CASE.format("t", "x", "t.py", ""), failures=1), False),
        (suite(CASE.format("t", "x", "t.py", "<failure/>")), False),
        (suite(CASE.format("t", "x", "t.py", ""), tests=0), False),
        (suite(CASE.format("t", "x", "t.py", ""), tests=4), True),
        (suite(CASE.format("t", "x", "t.py", "<failure/>"), CASE.format("t", "x", "t.py", "<error/>"),
               tests=1, failures=1, errors=1), True),
        (b'<testsuite tests="many"><testcase classname="t" name="x"/></testsuite>', False),
    ],
    ids=["equal", "a failure too many", "a failure left out", "a test left out", "passed subtests have no case",
         "failing twice is one test", "not a number"],
)  # fmt: skip
def test_the_counters_of_a_suite_are_compared_with_its_cases(report, agree):
    assert junit.parse_junit(report).counters_agree is agree


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"PASSED",
        b"<testsuite><testcase></testsuite>",
        b'<!DOCTYPE x [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]><testsuite><testcase name="&b;"/></testsuite>',
        '<?xml version="1.0" encoding="utf-16"?><!DOCTYPE x SYSTEM "file:///etc/passwd"><a/>'.encode(
            "utf-16"
        ),
        b"<a>" * 100 + b"</a>" * 100,
    ],
    ids=["empty", "text", "unbalanced", "entities", "a document type in UTF-16", "deep"],
)
def test_a_report_no_runner_writes_is_unreadable(data):
    with pytest.raises(junit.ReportUnreadable):
        junit.parse_junit(data)


def test_a_report_without_cases_says_so():
    assert junit.parse_junit(suite()).cases == 0
