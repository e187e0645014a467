"""From a stored patch to a recorded reward: grade in fresh sandboxes, judge doubtful verdicts by a control, decide once."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from orchestrator import errors, provenance
from orchestrator.errors import GradeOutcome
from orchestrator.grading.base import GRADER, GRADER_VERSION, Grade, grader_digest
from orchestrator.grading.validate import noop_patch
from orchestrator.rollout import custody
from orchestrator.sandbox.base import Role
from orchestrator.steps import patched
from store import failpoints, rows

if TYPE_CHECKING:
    from orchestrator.rollout.walk import Walk
    from orchestrator.settings import Settings
    from orchestrator.tasks.record import Task
    from store.history import Record


def digest_of(task: Task, settings: Settings) -> str:
    """Identify the grader that this task and these settings make."""
    return grader_digest(task.eval_sha256, settings.grading.model_dump_json())


async def settle(walk: Walk) -> None:
    """Grade the stored patch unless a verdict exists, then record reward and stats with the transition `grade`.

    Raises `errors.GraderError` or `errors.SandboxLost` when the grade budget is spent, `errors.TaskInvalid` for an
    ungradable task.
    """
    history = walk.runtime.store.history
    patch = (await history.of_rollout("patches", walk.lease.rollout_id))[-1]
    grade = await _verdict(walk, patch)
    if grade is None:
        data = await history.artifact(patch["artifact"])
        while grade is None:
            await _attempt(walk, patch, data)
            grade = await _verdict(walk, patch)
    facts = await provenance.gather(history, walk.lease.rollout_id, grade["grade_id"])
    masked = bool(grade["mask_sample"])
    reward = rows.RewardRow(
        grade_id=grade["grade_id"],
        reward=provenance.reward_of(GradeOutcome(grade["outcome"]), masked=masked),
        invalid_reason=f"masked:{_why_masked(grade)}" if masked else None,
        reward_fn_version=provenance.REWARD_FN,
        outcome_table=errors.OUTCOME_TABLE_VERSION,
        stats=provenance.stats_of(facts),
    )
    await walk.move(
        "grade", payload={"grade_id": grade["grade_id"], "outcome": grade["outcome"]}, extra=[reward]
    )


def _why_masked(grade: Record) -> str:
    return str(next((flag for flag in grade["flags"] if flag in patched.MASKING), grade["outcome"]))


async def _verdict(walk: Walk, patch: Record) -> Record | None:
    digest = digest_of(walk.task, walk.settings)
    for row in await walk.runtime.store.history.of_rollout("grades", walk.lease.rollout_id):
        same = row["patch_sha256"] == patch["sha256"] and row["grader_digest"] == digest
        if same and row["verdict"] and row["reason"] == "first":
            return row
    return None


async def _attempt(walk: Walk, patch: Record, data: bytes) -> None:
    """Make one grading attempt and store it, whatever it found."""
    limits, sandbox_key, isolation = walk.settings.limits, None, None
    grade = patched.out_of_time(patch["exit_reason"], limits.on_timeout) or patched.needs_no_sandbox(data)
    if grade is None:
        grade, sandbox_key, isolation = await _grade_in_fresh_sandbox(walk, data)
    flags = [*grade.flags, *(await _open_call(walk, patch))]
    rule = errors.GRADE_RULES[grade.outcome]
    masked = bool(patched.MASKING & set(flags)) or (
        rule.maskable and await _task_is_in_doubt(walk, grade.outcome)
    )
    row = await asyncio.to_thread(
        _grade_row,
        walk,
        grade,
        patch_sha256=patch["sha256"],
        sandbox_key=sandbox_key,
        isolation=isolation,
        masked=masked,
        flags=flags,
    )
    given_up = [] if sandbox_key is None else [rows.SandboxReleasing(key=sandbox_key)]
    await walk.note([row, *given_up], spend=None if rule.verdict else errors.Budget.GRADE.value)
    await walk.release_given_up()
    if rule.verdict:
        return
    if grade.outcome is GradeOutcome.UNGRADABLE:
        raise errors.TaskInvalid(grade.error_text or "the task cannot be graded as it is written")
    spent = sum(not g["verdict"] for g in await _all_attempts(walk))
    if spent > errors.BUDGETS[errors.Budget.GRADE]:
        lost = grade.outcome is GradeOutcome.SANDBOX_LOST
        failure = errors.SandboxLost if lost else errors.GraderError
        raise failure(f"{spent} grading attempts failed, the last one: {grade.error_text}")


async def _all_attempts(walk: Walk) -> list[Record]:
    return await walk.runtime.store.history.of_rollout("grades", walk.lease.rollout_id)


async def _grade_in_fresh_sandbox(walk: Walk, data: bytes) -> tuple[Grade, str, str]:
    spec = await custody.next_spec(walk.runtime, walk.lease, Role.GRADING, walk.task, walk.settings)
    sandbox = await walk.make_sandbox(spec)
    try:
        async with walk.kept(sandbox):
            await walk.note([custody.live_of(sandbox)])
        grade = await patched.grade(walk.task, data, sandbox, walk.settings.grading)
        failpoints.hit("grade.after_grading")
    finally:
        await sandbox.detach()
    return grade, spec.key, sandbox.isolation.value


async def _open_call(walk: Walk, patch: Record) -> list[str]:
    """Return the flag of a rollout whose time ended while its caller's session still sampled an answer.

    A trainer sets the reward on the last call it began, and skips that one: the reward would be lost or land wrongly.
    """
    if walk.row["endpoint_kind"] != "session" or patch["exit_reason"] != errors.ExitReason.WALL_TIME:
        return []
    calls = await walk.runtime.store.history.of_rollout("llm_calls", walk.lease.rollout_id)
    return [patched.CALL_OPEN] if calls and calls[-1]["outcome"] == "ambiguous" else []


async def _task_is_in_doubt(walk: Walk, outcome: GradeOutcome) -> bool:
    """Say whether the no-op patch shows the same symptom; runs that control once per task and grader."""
    history, digest = walk.runtime.store.history, digest_of(walk.task, walk.settings)
    known = [v for v in await history.validations(walk.task.sha256, digest) if v["patch"] == "noop"]
    if not known:
        control, key, _ = await _grade_in_fresh_sandbox(walk, noop_patch(walk.task))
        await walk.note([rows.SandboxReleasing(key=key)])
        await walk.release_given_up()
        if not errors.GRADE_RULES[control.outcome].verdict:
            return True
        await walk.runtime.store.record_validation(
            validation_row(walk.task, walk.settings, "noop", control, [])
        )
        return control.outcome is outcome
    return any(v["outcome"] == outcome for v in known)


def validation_row(
    task: Task, settings: Settings, patch: str, grade: Grade, reasons: list[str]
) -> rows.ValidationRow:
    """Return the stored form of one control run; `reasons` say what was not as expected."""
    return rows.ValidationRow(
        task_sha256=task.sha256,
        task_json=task.to_json(),
        instance_id=task.instance_id,
        dataset_kind=task.dataset_kind.value,
        eval_sha256=task.eval_sha256,
        grader_digest=digest_of(task, settings),
        patch=patch,
        outcome=grade.outcome.value,
        as_expected=not reasons,
        reasons=reasons,
        test_map=rows.Artifact.of(rows.canonical_json(grade.tests).encode()),
        log=rows.Artifact.of(grade.log),
        duration_s=round(grade.duration_s, 3),
    )


def _grade_row(
    walk: Walk,
    grade: Grade,
    *,
    patch_sha256: str,
    sandbox_key: str | None,
    isolation: str | None,
    masked: bool,
    flags: list[str],
) -> rows.GradeRow:
    return rows.GradeRow(
        grade_id=walk.runtime.new_id(),
        patch_sha256=patch_sha256,
        grader_digest=digest_of(walk.task, walk.settings),
        grader=GRADER,
        grader_version=GRADER_VERSION,
        reason="first",
        outcome=grade.outcome.value,
        verdict=errors.GRADE_RULES[grade.outcome].verdict,
        reward=provenance.reward_of(grade.outcome, masked=masked),
        mask_sample=masked,
        evidence=grade.evidence.value,
        f2p_pass=grade.f2p_pass,
        f2p_total=grade.f2p_total,
        p2p_pass=grade.p2p_pass,
        p2p_total=grade.p2p_total,
        test_map=rows.Artifact.of(rows.canonical_json(grade.tests).encode()),
        log=rows.Artifact.of(grade.log),
        exit_code=grade.exit_code,
        task_sha256=walk.task.sha256,
        eval_sha256=walk.task.eval_sha256,
        isolation=isolation,
        sandbox_key=sandbox_key,
        flags=flags,
        duration_s=round(grade.duration_s, 3),
        error_class=grade.error_class,
        error_text=grade.error_text,
    )
