"""A trainer's way in: one call per rollout on a worker's single event loop, sharing one store and its sandboxes.

Importing it costs next to nothing; the first call loads everything else in a thread, beside the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from typing import TYPE_CHECKING, Any

from orchestrator.entry.call import Call

if TYPE_CHECKING:
    from types import ModuleType

    from orchestrator.entry.run import Answer

__all__ = ["Call", "answer", "close", "run_record"]

logger = logging.getLogger(__name__)


async def run_record(data: object, call: Call) -> tuple[float | None, dict[str, Any]]:
    """Run one record to its reward; `(None, stats)` means that there is none and the sample must be dropped.

    Only `asyncio.CancelledError` is raised, after the rollout's end has been written down. `data` is never changed.
    """
    found = await answer(data, call)
    return (None, {}) if found is None else (found.reward, found.stats)


async def answer(data: object, call: Call) -> Answer | None:
    """Run one record; raises only `asyncio.CancelledError`. None when the program itself cannot be loaded."""
    try:
        run = await _loaded(call.agent_type)
    except Exception as e:  # noqa: BLE001 - logged there, with its traceback
        _say_unloadable(e)
        return None
    found: Answer = await run.answer(data, call)
    return found


_SAY_EVERY_S = 60.0
_said: list[float] = []


def _say_unloadable(error: Exception) -> None:
    now = time.monotonic()
    if not _said or now - _said[-1] >= _SAY_EVERY_S:
        _said[:] = [now]
        logger.critical(
            "no rollout can run here, because the program cannot be loaded; next: pip install -r requirements.txt, then"
            " `rollouts doctor`",
            exc_info=error,
        )


async def close() -> None:
    """Let go of what this event loop holds open; the next call opens it anew."""
    if "orchestrator.entry.run" in sys.modules:
        from orchestrator.entry import shared

        await shared.close()


async def _loaded(agent_type: str) -> ModuleType:
    """Return the module that runs calls, with all that this kind of agent needs."""
    from orchestrator.entry import loading

    return await asyncio.to_thread(loading.load, agent_type)
