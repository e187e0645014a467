"""Causes that hit every rollout must not burn GPUs in silence: they are said once a minute, and may end the process.

AReaL draws prompt after prompt while none gets a reward, so somebody has to notice.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from typing import TYPE_CHECKING, Generic, TypeVar

from orchestrator import assembly, errors

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from orchestrator.settings import TrainingSettings

logger = logging.getLogger(__name__)

T = TypeVar("T")

SYSTEMIC_EXIT = 78
"""Exit code of a process that gave up; sysexits.h calls it EX_CONFIG."""
_IN_A_ROW = 8
"""So many rollouts without a reward, and none with one in between, are no coincidence."""
_SAY_EVERY_S = 60.0
_OPENING_S = 300.0
"""A preflight that takes longer hangs; making the Python environment for tasks takes a minute."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_NEXT_STEPS = {
    errors.FailureClass.LLM_UNREACHABLE: "look whether the model endpoint runs and can be reached from this worker",
    errors.FailureClass.LLM_SESSION_GONE: "compare limits.deadline_s with the trainer's session timeout",
    errors.FailureClass.SANDBOX_CREATE_FAILED: "run `rollouts doctor`, then look at the sandbox provider",
    errors.FailureClass.SANDBOX_LOST: "look at the sandbox provider: its limits, its time to live, its nodes",
    errors.FailureClass.GRADER_ERROR: "run `rollouts validate` on the tasks",
    errors.FailureClass.TASK_INVALID: "run `rollouts validate` on the tasks",
}


class Watch:
    """Counts rollouts with and without a reward in this process."""

    def __init__(self, monotonic: Callable[[], float], leave: Callable[[int], object] = os._exit) -> None:
        self._monotonic = monotonic
        self._leave = leave
        self._causes: Counter[str] = Counter()
        """Since the last valid rollout."""
        self._began_s: float | None = None
        """When the first rollout since the last valid one was asked for."""
        self._systemic = False
        self._said_s = float("-inf")

    def valid(self) -> None:
        """Note a rollout with a reward."""
        self._causes.clear()
        self._began_s = None
        self._systemic = False

    def dropped(self, cause: str, message: str, hint: str = "", *, systemic: bool = False) -> None:
        """Note a rollout without one; `systemic` when its cause hits every rollout for certain."""
        now = self._monotonic()
        self._began_s = now if self._began_s is None else self._began_s
        self._causes[cause] += 1
        self._systemic = self._systemic or systemic
        in_a_row = sum(self._causes.values())
        if (systemic or in_a_row >= _IN_A_ROW) and now - self._said_s >= _SAY_EVERY_S:
            self._said_s = now
            logger.critical(
                "%d rollouts in a row without a reward (%s); the last one: %s; next: %s",
                in_a_row,
                ", ".join(f"{name} {number}" for name, number in self._causes.most_common()),
                message,
                hint or _next_step(cause),
            )

    def end_if_hopeless(self, chosen: TrainingSettings) -> None:
        """End the process when the settings say so and nothing has succeeded for long."""
        began = self._began_s
        waited = 0.0 if began is None else self._monotonic() - began
        hopeless = self._systemic or sum(self._causes.values()) >= _IN_A_ROW
        if chosen.on_systemic == "exit" and hopeless and waited >= chosen.exit_after_s:
            logger.critical(
                "no valid rollout for %.0f s (%s): this process ends with %d, because training.on_systemic is exit",
                waited,
                ", ".join(self._causes),
                SYSTEMIC_EXIT,
            )
            self._leave(SYSTEMIC_EXIT)


def _next_step(cause: str) -> str:
    known = {failure.value: step for failure, step in _NEXT_STEPS.items()}
    return known.get(cause, "see `rollouts list --state failed` and `rollouts show ID`")


class Preflight(Generic[T]):
    """Something every rollout needs, opened once. While that fails, the failure is the answer, tried again ever less."""

    def __init__(self, opening: Callable[[], Awaitable[T]], monotonic: Callable[[], float]) -> None:
        self._opening = opening
        self._monotonic = monotonic
        self._lock = asyncio.Lock()
        self._opened: list[T] = []
        self._failure: Exception | None = None
        self._pause_s = _FIRST_PAUSE_S
        self._again_s = float("-inf")

    @property
    def opened(self) -> T | None:
        """What was opened, None before."""
        return self._opened[0] if self._opened else None

    async def get(self) -> T:
        """Return it, opened by the first caller; raises `PreflightFailed` with the cause."""
        if self._opened:
            return self._opened[0]
        async with self._lock:
            if not self._opened:
                if self._failure is not None and self._monotonic() < self._again_s:
                    raise PreflightFailed(self._failure)
                await self._open()
            return self._opened[0]

    async def _open(self) -> None:
        try:
            async with asyncio.timeout(_OPENING_S):
                self._opened.append(await self._opening())
        except Exception as e:
            if not isinstance(e, errors.RolloutsError | assembly.StoreError | OSError):
                logger.exception("an unforeseen failure before the first rollout")
            self._failure = e
            self._again_s = self._monotonic() + self._pause_s
            self._pause_s = min(_LONGEST_PAUSE_S, self._pause_s * 2)
            raise PreflightFailed(e) from e


class PreflightFailed(Exception):
    """No rollout can be run in this process at the moment."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause) or type(cause).__name__)
        self.hint: str = getattr(cause, "hint", "")
