from __future__ import annotations

import pytest

from orchestrator.errors import GradeOutcome
from orchestrator.grading.verdict import Expected, Seen, decide

F, P, K, O = "t.py::fixed", "t.py::kept", "t.py::known", "t.py::other"  # noqa: E741 - four short names for tables
LISTS = Expected(fail_to_pass=(F,), pass_to_pass=(P,), known_failing=(K,))
STRICT = Expected(fail_to_pass=(F,), pass_to_pass=(P,), known_failing=(K,), strict=True)
OK = {F: "PASSED", P: "PASSED"}


@pytest.mark.parametrize(
    ("expected", "tests", "exit_code", "outcome"),
    [
        (STRICT, OK, 0, "resolved"),
        (STRICT, OK | {K: "FAILED"}, 1, "resolved"),
        (STRICT, OK | {O: "FAILED"}, 1, "unresolved"),
        (STRICT, OK | {K: "FAILED", O: "ERROR"}, 1, "unresolved"),
        (STRICT, OK, 1, "unresolved"),
        (STRICT, OK, 2, "unresolved"),
        (STRICT, OK, 137, "unresolved"),
        (STRICT, OK, None, "unresolved"),
        (STRICT, OK | {F: "FAILED"}, 1, "unresolved"),
        (STRICT, OK | {F: "FAILED"}, 0, "unresolved"),
        (STRICT, OK | {F: "SKIPPED"}, 0, "unresolved"),
        (STRICT, OK | {F: "XFAIL"}, 0, "unresolved"),
        (STRICT, OK | {F: "XPASS"}, 0, "unresolved"),
        (STRICT, OK | {P: "SKIPPED"}, 0, "unresolved"),
        (STRICT, OK | {P: "ERROR"}, 1, "unresolved"),
        (STRICT, {P: "PASSED"}, 0, "unresolved"),
        (STRICT, {F: "PASSED"}, 0, "unresolved"),
        (STRICT, {O: "PASSED"}, 0, "unresolved"),
        (STRICT, {}, 0, "no_report"),
        (STRICT, {}, 1, "no_report"),
        (LISTS, OK | {O: "FAILED"}, 1, "resolved"),
        (LISTS, OK, 1, "unresolved"),
        (LISTS, OK, 4, "unresolved"),
        (Expected(pass_to_pass=(P,)), {P: "PASSED"}, 0, "unresolved"),
    ],
)
def test_the_lists_and_the_exit_code_decide(expected, tests, exit_code, outcome):
    assert decide(expected, Seen(tests=tests, exit_code=exit_code)).outcome == outcome


def test_counters_that_disagree_resolve_nothing():
    assert decide(STRICT, Seen(tests=OK, exit_code=0, counters_agree=False)).outcome == "unresolved"


def test_a_listed_test_that_is_not_in_the_report_is_missing_and_counts_as_failed():
    verdict = decide(STRICT, Seen(tests={F: "PASSED", O: "PASSED"}, exit_code=0))
    assert verdict.tests == {F: "PASSED", O: "PASSED", P: "MISSING"}
    assert (verdict.f2p_pass, verdict.p2p_pass) == (1, 0)


def test_a_kept_test_may_be_skipped_when_validation_saw_it_skipped():
    expected = Expected(fail_to_pass=(F,), pass_to_pass=(P,), validated={P: "SKIPPED", F: "SKIPPED"})
    assert decide(expected, Seen(tests={F: "PASSED", P: "SKIPPED"}, exit_code=0)).outcome == "resolved"
    assert decide(expected, Seen(tests={F: "SKIPPED", P: "PASSED"}, exit_code=0)).outcome == "unresolved"


def test_an_id_cut_inside_a_parameter_matches_by_its_beginning_and_the_worst_match_counts():
    expected = Expected(fail_to_pass=("t.py::x[a",))
    seen = {"t.py::x[a b]": "PASSED", "t.py::x[a c]": "PASSED", "t.py::x[d]": "FAILED"}
    verdict = decide(expected, Seen(tests=seen, exit_code=1))
    assert (verdict.outcome, verdict.flags) == (GradeOutcome.RESOLVED, ["prefix_match:t.py::x[a"])
    worse = decide(expected, Seen(tests=seen | {"t.py::x[a c]": "FAILED"}, exit_code=1))
    assert worse.outcome == "unresolved"
    assert decide(Expected(fail_to_pass=("t.py::x",)), Seen(tests=seen, exit_code=1)).outcome == "unresolved"


def test_a_log_of_failures_only_passes_what_it_does_not_name():
    expected = Expected(fail_to_pass=(F,), pass_to_pass=(P,), fail_only=True)
    assert decide(expected, Seen(tests={}, exit_code=0)).outcome == "resolved"
    assert decide(expected, Seen(tests={}, exit_code=1)).outcome == "no_report"
    assert decide(expected, Seen(tests={P: "FAILED"}, exit_code=1)).outcome == "unresolved"


@pytest.mark.parametrize(
    ("found", "outcome"),
    [
        ({"t.py::C::a": "PASSED", "t.py::b": "FAILED"}, "resolved"),
        ({"C.a": "PASSED", "b": "FAILED"}, "resolved"),
        ({"t.py::C::a": "PASSED", "t.py::b": "PASSED"}, "unresolved"),
        ({"t.py::C::a": "PASSED"}, "unresolved"),
        ({"t.py::C::a": "PASSED", "t.py::b": "FAILED", "t.py::c": "PASSED"}, "unresolved"),
        ({}, "no_report"),
    ],
)
def test_an_expected_map_must_come_out_whole(found, outcome):
    expected = Expected(status_map={"C.a": "PASSED", "b": "FAILED"})
    assert decide(expected, Seen(tests=found, exit_code=1)).outcome == outcome
