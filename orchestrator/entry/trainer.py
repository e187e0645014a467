"""What AReaL says of the call it makes, and its statistics; both are optional, and never in the way of a rollout."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """Where in a training run the call stands; None is what the trainer does not say."""

    task_id: int | None = None
    """Begins at 0 again with every start of the trainer."""
    sample: int | None = None
    """Index within the group."""
    is_eval: bool = False
    policy_version: str | None = None


def context() -> Context:
    """Return what AReaL's context variable says of the running call."""
    try:
        from areal.infra import workflow_context

        found: Any = workflow_context.get()
    except Exception as e:  # noqa: BLE001 - somebody else's code, whatever it raises
        logger.debug("no AReaL context: %s", e)
        return Context()
    version = next(
        (v for n in ("version", "policy_version") if (v := getattr(found, n, None)) is not None), None
    )
    return Context(
        task_id=_whole(getattr(found, "task_id", None)),
        sample=_whole(getattr(found, "sample_idx", None)),
        is_eval=bool(getattr(found, "is_eval", False)),
        policy_version=None if version is None else str(version),
    )


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def publish(stats: Mapping[str, object]) -> None:
    """Hand the numbers among `stats` to AReaL's tracker, each once and as a float; without AReaL nothing happens.

    A tracker that fails costs its numbers and nothing else.
    """
    numbers = {
        name: float(value)
        for name, value in stats.items()
        if isinstance(value, bool | int | float) and math.isfinite(value)
    }
    try:
        from areal.infra import workflow_context
        from areal.utils import stats_tracker

        stats_tracker.get(workflow_context.stat_scope()).scalar(**numbers)
    except ImportError:
        return
    except Exception as e:  # noqa: BLE001 - somebody else's code, whatever it raises
        logger.warning("AReaL's statistics tracker refused %d numbers: %s", len(numbers), e)
