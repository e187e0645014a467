"""What a run came to, one line for each task."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from orchestrator.cli import render
from orchestrator.errors import GradeOutcome
from orchestrator.states import TERMINAL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from store.history import Record

COLUMNS = tuple(
    render.Column(name)
    for name in ("instance_id", "samples", "resolved", "reward_mean", "no_reward", "outcomes")
)


def has_no_reward(row: Record) -> bool:
    """Say whether a rollout is over, or as good as over, without a number."""
    return row["reward"] is None and (row["state"] in TERMINAL or row["grade_outcome"] is not None)


def outcome_of(row: Record) -> str:
    """Name how a rollout ended; empty while nothing is known."""
    if row["failure_class"] is not None:
        return f"failed:{row['failure_class']}"
    if row["grade_outcome"] is None:
        return ""
    return f"masked:{row['grade_outcome']}" if row["mask_sample"] else str(row["grade_outcome"])


def by_instance(rows: Sequence[Record]) -> list[dict[str, Any]]:
    """Sum up the rows of `History.overview`, in the order of instance ids."""
    lines = []
    for instance_id in sorted({row["instance_id"] for row in rows}):
        of_it = [row for row in rows if row["instance_id"] == instance_id]
        rewards = [row["reward"] for row in of_it if row["reward"] is not None]
        outcomes = Counter(outcome_of(row) or f"unfinished:{row['state']}" for row in of_it)
        lines.append(
            {
                "instance_id": instance_id,
                "samples": len(of_it),
                "resolved": outcomes[GradeOutcome.RESOLVED],
                "reward_mean": round(sum(rewards) / len(rewards), 4) if rewards else None,
                "no_reward": sum(has_no_reward(row) for row in of_it),
                "outcomes": ", ".join(f"{name} {n}" for name, n in sorted(outcomes.items())),
            }
        )
    return lines
