"""Grade one patch in one fresh sandbox: place it, run the tests, read what they left, decide.

The patch is the only thing that crosses from the agent; hidden tests and scripts exist in the grading sandbox alone.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from orchestrator import errors
from orchestrator.errors import GradeOutcome
from orchestrator.grading import commands, flags, junit, placement, verdict
from orchestrator.grading.base import Evidence, Grade
from orchestrator.grading.commands import Mode
from orchestrator.grading.pytest_log import parse_pytest_log
from orchestrator.sandbox import repository
from orchestrator.tasks.log_parsers import LOG_PARSERS

if TYPE_CHECKING:
    from orchestrator.grading.placement import Placement
    from orchestrator.sandbox.base import CommandResult, Sandbox
    from orchestrator.tasks.record import Task


@dataclass(slots=True)
class _Reading:
    """What was read from a finished run."""

    evidence: Evidence
    seen: verdict.Seen | None = None
    """None when there is no report."""
    flags: list[str] = field(default_factory=list)
    why: str | None = None


def is_empty(patch: bytes) -> bool:
    """Say whether a patch changes nothing (whitespace only): it is not graded, its grade is `empty_patch_grade()`."""
    return not patch.strip()


def empty_patch_grade() -> Grade:
    """Return the grade of a patch that changes nothing; no sandbox is needed for it."""
    return Grade(outcome=GradeOutcome.EMPTY_PATCH, evidence=Evidence.NONE)


async def grade(task: Task, patch: bytes, sandbox: Sandbox, *, timeout_s: float, log_limit: int) -> Grade:
    """Grade a patch that is not empty in a fresh grading sandbox, which must not be used again.

    `timeout_s` limits the test command alone, `log_limit` the bytes kept of its output. Raises `errors.SandboxLost`
    when the sandbox goes and `errors.GraderError` when something of ours fails; neither says anything about the patch.
    """
    if is_empty(patch):
        raise ValueError("an empty patch is not graded: use empty_patch_grade()")
    if (reason := _why_ungradable(task)) is not None:
        return Grade(
            outcome=GradeOutcome.UNGRADABLE,
            evidence=Evidence.NONE,
            error_class="ungradable",
            error_text=reason,
        )
    await repository.keep_pristine(sandbox)
    placed = await placement.place(task, patch, sandbox)
    placed.flags += flags.scan_patch(patch)
    if placed.applied is placement.Applied.MODEL_REFUSED:
        return _refused(task, GradeOutcome.PATCH_APPLY_FAILED, placed)
    if placed.applied is placement.Applied.TEST_REFUSED:
        return _refused(task, GradeOutcome.TEST_PATCH_FAILED, placed)
    return await _test(task, sandbox, placed, timeout_s=timeout_s, log_limit=log_limit)


def _why_ungradable(task: Task) -> str | None:
    mode = commands.choose_mode(task)
    if mode is Mode.NONE:
        return "the record names no test to run"
    parser = task.log_parser
    if mode is Mode.MARKED_SCRIPT and parser is not None and parser not in LOG_PARSERS:
        return f"log parser {parser!r} is not implemented"
    lists_decide = mode in {Mode.STRICT, Mode.LISTED} or (
        mode is Mode.MARKED_SCRIPT and not task.expected_status
    )
    if lists_decide and not task.fail_to_pass:
        return "FAIL_TO_PASS is empty, so any patch would pass"
    return None


def _refused(task: Task, outcome: GradeOutcome, placed: Placement) -> Grade:
    return Grade(
        outcome=outcome,
        evidence=Evidence.NONE,
        f2p_total=len(task.fail_to_pass),
        p2p_total=len(task.pass_to_pass),
        flags=placed.flags,
        error_class=outcome.value,
        error_text=placed.message,
    )


async def _test(
    task: Task, sandbox: Sandbox, placed: Placement, *, timeout_s: float, log_limit: int
) -> Grade:
    start_nonce, end_nonce = secrets.token_hex(16), secrets.token_hex(16)
    command = commands.build(task, sandbox.workdir, start_nonce=start_nonce, end_nonce=end_nonce)
    out = await _make_folder(sandbox)
    if command.script is not None:
        await sandbox.write(f"{out}/script", command.script)
    result = await sandbox.run(
        [argument.replace("{out}", out) for argument in command.argv],
        timeout_s=timeout_s,
        env=command.env,
        output_limit=log_limit,
    )
    await sandbox.stop()
    if result.timed_out:
        return _finish(task, _Reading(evidence=Evidence.NONE), result, placed, GradeOutcome.TESTS_TIMEOUT)
    if command.mode in {Mode.STRICT, Mode.LISTED}:
        reading = await _read_junit(task, sandbox, f"{out}/junit.xml", result)
    elif command.mode is Mode.MARKED_SCRIPT:
        reading = await asyncio.to_thread(_read_log, task, result, start_nonce, end_nonce)
    else:
        reading = _Reading(evidence=Evidence.EXIT_CODE)
        solved = result.exit_code == 0
        outcome = GradeOutcome.RESOLVED if solved else GradeOutcome.UNRESOLVED
        return _finish(task, reading, result, placed, outcome)
    return _finish(task, reading, result, placed, None)


async def _make_folder(sandbox: Sandbox) -> str:
    """Make a folder of this run outside the repository, with a name nobody can have prepared."""
    result = await sandbox.run(["mktemp", "-d"], timeout_s=60)
    lines = result.output.decode("utf-8", "replace").split()
    if result.exit_code != 0 or not lines:
        raise errors.GraderError(
            f"sandbox {sandbox.key}: no temporary folder could be made ({repository.describe(result)})"
        )
    return lines[-1]


async def _read_junit(task: Task, sandbox: Sandbox, path: str, result: CommandResult) -> _Reading:
    reading = _Reading(evidence=Evidence.JUNIT, flags=flags.scan_log(result.output))
    try:
        data = await sandbox.read(path, limit=junit.SIZE_LIMIT)
        listed = (*task.fail_to_pass, *task.pass_to_pass, *task.known_failing)
        report = await asyncio.to_thread(junit.parse_junit, data, listed)
    except FileNotFoundError:
        reading.why = f"the test command left no report (exit code {result.exit_code})"
        return reading
    except ValueError as error:
        reading.why = str(error)
        return reading
    if not report.counters_agree:
        reading.flags.append("junit_counters_disagree")
    if report.cases:
        reading.seen = verdict.Seen(
            tests=report.tests, exit_code=result.exit_code, counters_agree=report.counters_agree
        )
    else:
        reading.why = "the report has no test case"
    return reading


def _read_log(task: Task, result: CommandResult, start_nonce: str, end_nonce: str) -> _Reading:
    reading = _Reading(evidence=Evidence.EXPECTED_MAP if task.expected_status else Evidence.LOG_TEXT)
    _, _, rest = result.output.rpartition(f"\n{start_nonce}\n".encode())
    log, end, _ = rest.rpartition(f"\n{end_nonce}\n".encode())
    if not end:
        reading.why = "the script ended before its test command was done"
        return reading
    flavour = LOG_PARSERS.get(task.log_parser or "pytest", "pytest")
    tests = parse_pytest_log(log.decode("utf-8", "replace"), flavour)
    if result.truncated:
        reading.flags.append("log_truncated")
        if {*task.fail_to_pass, *task.pass_to_pass} - tests.keys():
            reading.why = "the log was too long to be kept whole and lacks listed tests"
            return reading
    reading.seen = verdict.Seen(tests=tests, exit_code=result.exit_code)
    return reading


def _finish(
    task: Task, reading: _Reading, result: CommandResult, placed: Placement, outcome: GradeOutcome | None
) -> Grade:
    """Build the grade; without an `outcome` the lists decide."""
    weak = reading.evidence in {Evidence.EXIT_CODE, Evidence.NONE}
    decided = verdict.Verdict(outcome=outcome or GradeOutcome.NO_REPORT, tests={})
    if reading.seen is not None:
        decided = verdict.decide(
            verdict.Expected(
                fail_to_pass=task.fail_to_pass,
                pass_to_pass=task.pass_to_pass,
                known_failing=task.known_failing,
                strict=task.strict,
                status_map=task.expected_status,
                fail_only=task.eval_type == "fail_only" and reading.evidence is Evidence.LOG_TEXT,
            ),
            reading.seen,
        )
    found = [*placed.flags, *reading.flags, *decided.flags, *flags.scan_exit_code(result.exit_code)]
    no_report = decided.outcome is GradeOutcome.NO_REPORT
    return Grade(
        outcome=decided.outcome,
        evidence=Evidence.NONE if no_report else reading.evidence,
        tests=decided.tests,
        f2p_pass=decided.f2p_pass,
        f2p_total=0 if weak and outcome is not GradeOutcome.TESTS_TIMEOUT else len(task.fail_to_pass),
        p2p_pass=decided.p2p_pass,
        p2p_total=0 if weak and outcome is not GradeOutcome.TESTS_TIMEOUT else len(task.pass_to_pass),
        exit_code=result.exit_code,
        duration_s=result.duration_s,
        log=result.output,
        flags=list(dict.fromkeys(found)),
        error_class=decided.outcome.value if no_report else None,
        error_text=(reading.why or "nothing in the log could be read as a test result")
        if no_report
        else None,
    )
