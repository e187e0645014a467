"""From what a test run showed to a verdict: pure, so that every stored grade can be decided again from its evidence."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from orchestrator.errors import GradeOutcome
from orchestrator.grading.junit import worst

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MISSING = "MISSING"
_FAILING = frozenset({"FAILED", "ERROR"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """What the task asks for."""

    fail_to_pass: tuple[str, ...] = ()
    pass_to_pass: tuple[str, ...] = ()
    known_failing: tuple[str, ...] = ()
    strict: bool = False
    """Every failing test outside the lists must be known to fail (the lists come from a validation of ours)."""
    status_map: Mapping[str, str] | None = None
    """R2E-Gym: the whole map that must come out, nothing more and nothing less."""
    fail_only: bool = False
    """The log names failures only: a listed test it does not name has passed."""
    validated: Mapping[str, str] = field(default_factory=dict)
    """Status of PASS_TO_PASS tests that validation saw skipped or failing as expected."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """What the run showed."""

    tests: Mapping[str, str] = field(default_factory=dict)
    exit_code: int | None = None
    counters_agree: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The outcome with the status of every test it rests on."""

    outcome: GradeOutcome
    tests: dict[str, str]
    f2p_pass: int = 0
    p2p_pass: int = 0
    flags: list[str] = field(default_factory=list)


def decide(expected: Expected, seen: Seen) -> Verdict:
    """Apply the rules for a run that ended by itself.

    Resolved means: every listed test passed, none is missing, the report's totals agree with its cases, and the exit
    code is 0, or 1 with failures outside the lists that explain it. SKIPPED and XFAIL never satisfy a FAIL_TO_PASS test.
    """
    if expected.status_map is not None:
        return _compare_maps(expected.status_map, seen)
    if not seen.tests and not (expected.fail_only and seen.exit_code == 0):
        return Verdict(outcome=GradeOutcome.NO_REPORT, tests={})
    tests = dict(seen.tests)
    flags: list[str] = []
    listed = (*expected.fail_to_pass, *expected.pass_to_pass)
    for node_id in listed:
        tests[node_id] = _status(node_id, seen.tests, fail_only=expected.fail_only, flags=flags)
    f2p_pass = sum(tests[node_id] == "PASSED" for node_id in expected.fail_to_pass)
    p2p_pass = sum(
        tests[node_id] == "PASSED" or tests[node_id] == expected.validated.get(node_id)
        for node_id in expected.pass_to_pass
    )
    resolved = (
        bool(expected.fail_to_pass)
        and f2p_pass == len(expected.fail_to_pass)
        and p2p_pass == len(expected.pass_to_pass)
        and seen.counters_agree
        and _exit_code_fits(expected, seen, listed)
    )
    return Verdict(
        outcome=GradeOutcome.RESOLVED if resolved else GradeOutcome.UNRESOLVED,
        tests=tests,
        f2p_pass=f2p_pass,
        p2p_pass=p2p_pass,
        flags=flags,
    )


def _status(node_id: str, tests: Mapping[str, str], *, fail_only: bool, flags: list[str]) -> str:
    if node_id in tests:
        return tests[node_id]
    if "[" in node_id and not node_id.endswith("]"):
        # Published lists hold ids cut in the middle of a parameter.
        matches = [status for name, status in tests.items() if name.startswith(node_id)]
        if matches:
            flags.append(f"prefix_match:{node_id}")
            return worst(matches)
    return "PASSED" if fail_only else MISSING


def _exit_code_fits(expected: Expected, seen: Seen, listed: Iterable[str]) -> bool:
    if seen.exit_code != 1:
        return seen.exit_code == 0
    others = {name for name, status in seen.tests.items() if status in _FAILING} - set(listed)
    return bool(others) and (not expected.strict or others <= set(expected.known_failing))


def _compare_maps(status_map: Mapping[str, str], seen: Seen) -> Verdict:
    """R2E-Gym keys a test by its id without the file, joined with dots; both spellings are accepted."""
    if not seen.tests:
        return Verdict(outcome=GradeOutcome.NO_REPORT, tests={})
    found: dict[str, str] = {}
    for name, status in seen.tests.items():
        short = ".".join(name.split("::")[1:])
        key = name if name in status_map else short
        found[key] = worst((status, found.get(key, status)))
    wanted = [name for name, status in status_map.items() if status == "PASSED"]
    equal = found == dict(status_map)
    tests = found | {name: MISSING for name in status_map if name not in found}
    return Verdict(
        outcome=GradeOutcome.RESOLVED if equal else GradeOutcome.UNRESOLVED,
        tests=tests,
        f2p_pass=sum(tests[name] == "PASSED" for name in wanted),
    )
