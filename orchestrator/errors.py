"""The error tree, and the one table that says what every outcome is worth.

    RolloutsError
    |-- UsageError            the command, record or configuration is wrong; nothing was started (exit 2)
    |   |-- ConfigError       a setting is unknown or has a bad value
    |   |-- TaskFileError     a task file or folder cannot be read at all
    |   |-- RecordRefused     one task record cannot be graded; the rest of its file still runs
    |   `-- IsolationRefused  the machine offers no isolation and nobody allowed to go without
    |-- IllegalTransition     a programming error: the table has no such edge
    `-- Failure               the rollout (or this attempt) cannot go on; carries no reward
        `-- one class for each FailureClass

The store's errors have a root of their own (`store.errors.StoreError`), because the store imports nothing from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

OUTCOME_TABLE_VERSION = 1


class ExitReason(StrEnum):
    """How an agent ended. Every one is a result: the patch is extracted and graded all the same."""

    SUBMITTED = "submitted"
    NO_TOOL_CALL_STOP = "no_tool_call_stop"
    STEP_LIMIT = "step_limit"
    TOKEN_LIMIT = "token_limit"  # noqa: S105
    CONTEXT_WINDOW = "context_window"
    WALL_TIME = "wall_time"
    FORMAT_ERRORS = "format_errors"
    COMMAND_TIMEOUTS = "command_timeouts"
    CLI_ERROR = "cli_error"
    AGENT_DESTROYED_SANDBOX = "agent_destroyed_sandbox"


class GradeOutcome(StrEnum):
    """What one grading attempt found."""

    RESOLVED = "resolved"
    UNRESOLVED = "unresolved"
    EMPTY_PATCH = "empty_patch"
    PATCH_APPLY_FAILED = "patch_apply_failed"
    TEST_PATCH_FAILED = "test_patch_failed"
    TESTS_TIMEOUT = "tests_timeout"
    NO_REPORT = "no_report"
    GRADER_ERROR = "grader_error"
    SANDBOX_LOST = "sandbox_lost"
    UNGRADABLE = "ungradable"


class FailureClass(StrEnum):
    """Why a rollout has no reward."""

    SANDBOX_CREATE_FAILED = "sandbox_create_failed"
    SANDBOX_LOST = "sandbox_lost"
    LLM_UNREACHABLE = "llm_unreachable"
    LLM_SESSION_GONE = "llm_session_gone"
    NO_LLM_CALL = "no_llm_call"
    EXTRACT_FAILED = "extract_failed"
    GRADER_ERROR = "grader_error"
    TASK_INVALID = "task_invalid"
    WORKER_LOST = "worker_lost"
    CANCELLED = "cancelled"
    INTERNAL = "internal"


class Budget(StrEnum):
    """Which per-rollout retry budget a failure draws on."""

    CRASH = "crash"
    INFRA = "infra"
    GRADE = "grade"


BUDGETS: dict[Budget, int] = {Budget.CRASH: 2, Budget.INFRA: 5, Budget.GRADE: 2}
"""Retries allowed per rollout before it fails; agents have none, because an agent failure is a result."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GradeRule:
    """One row of the outcome table for a grade."""

    reward: float | None
    """What the default reward function gives; None where no number may exist."""
    verdict: bool
    """The grader did its work: the rollout moves to graded. False means retry or fail."""
    maskable: bool = False
    """The evidence may put the task itself in doubt; a control run decides whether the sample counts."""


GRADE_RULES: dict[GradeOutcome, GradeRule] = {
    GradeOutcome.RESOLVED: GradeRule(reward=1.0, verdict=True),
    GradeOutcome.UNRESOLVED: GradeRule(reward=0.0, verdict=True),
    GradeOutcome.EMPTY_PATCH: GradeRule(reward=0.0, verdict=True),
    GradeOutcome.PATCH_APPLY_FAILED: GradeRule(reward=0.0, verdict=True),
    GradeOutcome.TEST_PATCH_FAILED: GradeRule(reward=0.0, verdict=True, maskable=True),
    GradeOutcome.TESTS_TIMEOUT: GradeRule(reward=0.0, verdict=True, maskable=True),
    GradeOutcome.NO_REPORT: GradeRule(reward=0.0, verdict=True, maskable=True),
    GradeOutcome.GRADER_ERROR: GradeRule(reward=None, verdict=False),
    GradeOutcome.SANDBOX_LOST: GradeRule(reward=None, verdict=False),
    GradeOutcome.UNGRADABLE: GradeRule(reward=None, verdict=False),
}

FAILURE_BUDGETS: dict[FailureClass, Budget | None] = {
    FailureClass.SANDBOX_CREATE_FAILED: Budget.INFRA,
    FailureClass.SANDBOX_LOST: Budget.INFRA,
    FailureClass.LLM_UNREACHABLE: Budget.INFRA,
    FailureClass.LLM_SESSION_GONE: None,
    FailureClass.NO_LLM_CALL: None,
    FailureClass.EXTRACT_FAILED: Budget.INFRA,
    FailureClass.GRADER_ERROR: Budget.GRADE,
    FailureClass.TASK_INVALID: None,
    FailureClass.WORKER_LOST: Budget.CRASH,
    FailureClass.CANCELLED: None,
    FailureClass.INTERNAL: None,
}
"""The budget a new attempt is paid from; None means the rollout fails at once."""


class RolloutsError(Exception):
    """Something went wrong that a person or a caller can act on.

    `hint` is the next step, in the imperative; it may be empty.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class UsageError(RolloutsError):
    """The command or its input is wrong; nothing was started."""


class NothingKnown(RolloutsError):
    """The database named knows of no rollouts, so that nothing can be proven about sandboxes."""


class ConfigError(UsageError, ValueError):
    """A setting is unknown or has a bad value."""


class TaskFileError(UsageError):
    """A task file or folder cannot be read at all."""


class RecordRefused(UsageError, ValueError):
    """A task record cannot be graded, so running it would only waste work."""


class IsolationRefused(UsageError):
    """No isolation mechanism works on this machine and going without was not allowed."""


class IllegalTransition(RolloutsError):
    """The state machine has no such edge: a programming error."""


class Failure(RolloutsError):
    """An attempt cannot go on, for a reason that is not the agent's doing. Never becomes a reward."""

    failure_class: ClassVar[FailureClass] = FailureClass.INTERNAL

    @property
    def budget(self) -> Budget | None:
        """The retry budget this failure draws on, from the outcome table."""
        return FAILURE_BUDGETS[self.failure_class]


class SandboxCreateFailed(Failure):
    """The provider could not make a sandbox."""

    failure_class = FailureClass.SANDBOX_CREATE_FAILED


class SandboxLost(Failure):
    """The sandbox stopped answering or is gone."""

    failure_class = FailureClass.SANDBOX_LOST


class LlmUnreachable(Failure, ConnectionError):
    """The model endpoint could not be reached, or refused before anything can have been sampled."""

    failure_class = FailureClass.LLM_UNREACHABLE


class LlmSessionGone(Failure):
    """The endpoint no longer knows this rollout's session or key (401, 403, 410)."""

    failure_class = FailureClass.LLM_SESSION_GONE


class NoLlmCall(Failure):
    """The agent ended without one answer from the model."""

    failure_class = FailureClass.NO_LLM_CALL


class ExtractFailed(Failure):
    """The patch could not be taken whole; `value` is the extraction result (`extract_timeout`, ...)."""

    failure_class = FailureClass.EXTRACT_FAILED

    def __init__(self, message: str, *, value: str = "extract_failed", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.value = value


class GraderError(Failure):
    """The grader itself failed; the patch stays stored and is graded again."""

    failure_class = FailureClass.GRADER_ERROR


class TaskInvalid(Failure):
    """The task cannot be run or graded as it is written."""

    failure_class = FailureClass.TASK_INVALID


class WorkerLost(Failure):
    """The worker died and the attempt cannot be continued."""

    failure_class = FailureClass.WORKER_LOST


class RolloutCancelled(Failure):
    """The caller or a person cancelled the rollout."""

    failure_class = FailureClass.CANCELLED


class InternalError(Failure):
    """Anything nobody foresaw. Fails closed: no retry, no reward."""

    failure_class = FailureClass.INTERNAL
