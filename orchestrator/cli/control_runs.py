"""Grading what is known: the no-op and the gold patch of a task, in fresh sandboxes, through the grader of rollouts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

from orchestrator import errors
from orchestrator.grading import validate
from orchestrator.rollout import custody
from orchestrator.rollout.grades import validation_row
from orchestrator.sandbox.base import Role
from orchestrator.steps import patched

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractAsyncContextManager

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """Where control runs take place, shared by all tasks of a command."""

    store: Store
    provider: SandboxProvider
    settings: Settings
    runs: int
    """Of each patch."""
    ordinals: Iterator[int] = field(default_factory=lambda: count(1))

    def sandbox(self, task: Task) -> AbstractAsyncContextManager[Sandbox]:
        """Make a grading sandbox that belongs to no rollout, and remove it whatever happens."""
        key = custody.key_without_rollout(self.store, next(self.ordinals))
        spec = custody.spec_of(key, Role.GRADING, task, self.settings)
        return custody.without_rollout(self.store, self.provider, spec)


async def examine(task: Task, bench: Bench) -> Findings:
    """Grade the no-op patch and the gold patch as often as the bench says, store the verdicts, and judge the task."""
    found = Findings(noop=[], gold=[], reasons=[])
    origins: dict[str, str] = {}
    workdir = task.workdir
    grading = bench.settings.grading
    try:
        for number in range(bench.runs):
            async with bench.sandbox(task) as sandbox:
                if number == 0:
                    workdir = sandbox.workdir
                    origins = await validate.module_origins(task, sandbox)
                found.noop.append(await patched.grade(task, validate.noop_patch(task), sandbox, grading))
        for _ in range(bench.runs if task.gold_patch is not None else 0):
            async with bench.sandbox(task) as sandbox:
                found.gold.append(await patched.grade(task, task.gold_patch or b"", sandbox, grading))
    except errors.Failure as e:
        found.reasons.append(f"{e.failure_class.value}: {e}")
        return found
    await _record(task, bench.store, bench.settings, found)
    found.reasons += validate.compare(
        task, gold=found.gold, noop=found.noop, origins=origins, workdir=workdir
    ).reasons
    if task.gold_patch is None:
        found.reasons.append("there is no gold patch, so nothing shows that the task can be solved")
    return found


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
