"""While `patched`: grade the stored patch; only its bytes cross from the agent's sandbox to the grader's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator import errors
from orchestrator.grading import pipeline
from orchestrator.grading.base import Evidence, Grade

if TYPE_CHECKING:
    from orchestrator.sandbox.base import Sandbox
    from orchestrator.settings import GradingSettings
    from orchestrator.tasks.record import Task


CALL_OPEN = "llm_call_open"
"""Flag of a grade whose rollout ended while the trainer's model still answered it."""
MASKING = frozenset({"on_timeout:drop", CALL_OPEN})
"""Flags of a grade that is no reward, whatever its outcome."""


def out_of_time(exit_reason: str, on_timeout: str) -> Grade | None:
    """Return the verdict that the settings give an agent that ran out of time; None when its patch is graded."""
    if exit_reason != errors.ExitReason.WALL_TIME or on_timeout == "grade":
        return None
    return Grade(
        outcome=errors.GradeOutcome.UNRESOLVED, evidence=Evidence.NONE, flags=[f"on_timeout:{on_timeout}"]
    )


def needs_no_sandbox(patch: bytes) -> Grade | None:
    """Return the grade of an empty patch, None for any other."""
    return None if patch.strip() else pipeline.empty_patch_grade()


async def grade(task: Task, patch: bytes, sandbox: Sandbox, settings: GradingSettings) -> Grade:
    """Grade in a fresh sandbox; the grader's own trouble comes back as a grade without a verdict."""
    try:
        return await pipeline.grade(
            task,
            patch,
            sandbox,
            timeout_s=settings.timeout_s or task.timeout_s,
            log_limit=settings.log_limit_bytes,
        )
    except (errors.SandboxLost, errors.GraderError) as e:
        lost = isinstance(e, errors.SandboxLost)
        return Grade(
            outcome=errors.GradeOutcome.SANDBOX_LOST if lost else errors.GradeOutcome.GRADER_ERROR,
            evidence=Evidence.NONE,
            error_class=type(e).__name__,
            error_text=str(e),
        )
