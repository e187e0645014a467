"""Grading what is known: the no-op and the gold patch of a task, in fresh sandboxes, through the grader of rollouts."""

from __future__ import annotations

import uuid
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orchestrator import errors, identity
from orchestrator.grading import validate
from orchestrator.rollout.custody import spec_of
from orchestrator.rollout.grades import validation_row
from orchestrator.sandbox.base import Role
from orchestrator.steps import created, graded, patched

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from orchestrator.grading.base import Grade
    from orchestrator.sandbox.base import Sandbox, SandboxProvider
    from orchestrator.settings import Settings
    from orchestrator.tasks.record import Task
    from store.rollouts import Store


@dataclass(kw_only=True, slots=True)
class Findings:
    """What the control runs of one task showed."""

    noop: list[Grade]
    gold: list[Grade]
    reasons: list[str]
    """Why the task is not as it should be; empty when it is."""

    def row(self, task: Task) -> dict[str, Any]:
        """Return the line of the table for this task."""
        return {
            "instance_id": task.instance_id,
            "noop": _counted(self.noop),
            "gold": _counted(self.gold),
            "ok": not self.reasons,
            "reasons": "; ".join(self.reasons),
        }


async def examine(
    task: Task, store: Store, provider: SandboxProvider, settings: Settings, runs: int
) -> Findings:
    """Grade the no-op patch and the gold patch `runs` times each, store the verdicts, and judge the task."""
    found = Findings(noop=[], gold=[], reasons=[])
    origins: dict[str, str] = {}
    workdir = task.workdir
    try:
        for number in range(runs):
            async with _sandbox(task, store, provider, settings) as sandbox:
                if number == 0:
                    workdir = sandbox.workdir
                    origins = await validate.module_origins(task, sandbox)
                found.noop.append(
                    await patched.grade(task, validate.noop_patch(task), sandbox, settings.grading)
                )
        for _ in range(runs if task.gold_patch is not None else 0):
            async with _sandbox(task, store, provider, settings) as sandbox:
                found.gold.append(
                    await patched.grade(task, task.gold_patch or b"", sandbox, settings.grading)
                )
    except errors.Failure as e:
        found.reasons.append(f"{e.failure_class.value}: {e}")
        return found
    await _record(task, store, settings, found)
    found.reasons += validate.compare(
        task, gold=found.gold, noop=found.noop, origins=origins, workdir=workdir
    ).reasons
    if task.gold_patch is None:
        found.reasons.append("there is no gold patch, so nothing shows that the task can be solved")
    return found


@asynccontextmanager
async def _sandbox(
    task: Task, store: Store, provider: SandboxProvider, settings: Settings
) -> AsyncIterator[Sandbox]:
    """Make a grading sandbox that belongs to no rollout, and remove it whatever happens."""
    key = identity.sandbox_key(store.uuid, str(uuid.uuid4()), 1, 1)
    try:
        sandbox = await created.make_sandbox(provider, spec_of(key, Role.GRADING, task, settings))
        try:
            yield sandbox
        finally:
            await sandbox.detach()
    finally:
        await graded.release(provider, key, provider.ref)


async def _record(task: Task, store: Store, settings: Settings, found: Findings) -> None:
    """Store every verdict; trouble of the grader's own says nothing about the task and is not kept."""
    for kind, grades in (("noop", found.noop), ("gold", found.gold)):
        for grade in grades:
            if errors.GRADE_RULES[grade.outcome].verdict:
                row = validation_row(task, settings, kind, grade, _reasons_of(task, kind, grade))
                await store.record_validation(row)


def _reasons_of(task: Task, kind: str, grade: Grade) -> list[str]:
    """Say what is wrong with one run, taken by itself."""
    if kind == "gold":
        solved = grade.outcome is errors.GradeOutcome.RESOLVED
        return [] if solved else [f"gold is {grade.outcome.value}, not resolved"]
    without_gold = task.model_copy(update={"gold_patch": None})
    return validate.compare(without_gold, gold=[], noop=[grade], origins={}, workdir=task.workdir).reasons


def _counted(grades: Sequence[Grade]) -> str:
    counts = Counter(grade.outcome.value for grade in grades)
    return ", ".join(f"{name} {n}" for name, n in sorted(counts.items()))
