"""Why rollouts of a run have no reward, one line for each distinct cause."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.cli import summary
from orchestrator.cli.console import say
from orchestrator.errors import FailureClass

if TYPE_CHECKING:
    from collections.abc import Sequence

    from store.history import History, Record

LINES = 10
"""Causes shown at most; more of them say nothing that these do not."""
_SHOWN = 500


def shortened(text: str, length: int) -> str:
    """Return the beginning of a text that has no room."""
    return text if len(text) <= length else f"{text[: length - 3]}..."


async def tell(history: History, run_id: str, rows: Sequence[Record]) -> None:
    """Say how many rollouts have no reward, and why, the most frequent cause first.

    `rows` are those of `History.overview`. The first rollout of each cause is named.
    """
    missing = [row for row in rows if summary.has_no_reward(row)]
    if not missing:
        return
    say(f"{len(missing)} without a reward (failed or masked): rollouts list --run {run_id}")
    by_cause: dict[tuple[str, str], list[Record]] = {}
    for row in reversed(missing):  # newest first in the overview
        by_cause.setdefault((summary.outcome_of(row), row["failure_msg"] or ""), []).append(row)
    ordered = sorted(by_cause.items(), key=lambda cause: -len(cause[1]))
    for (outcome, message), of_it in ordered[:LINES]:
        first = of_it[0]
        why = message or await _why_masked(history, first["id"])
        more = f" (and {len(of_it) - 1} more)" if len(of_it) > 1 else ""
        what = outcome.removeprefix("failed:")
        say(f"rollout {first['id']} ({first['instance_id']}): {shortened(f'{what}: {why}', _SHOWN)}{more}")
    if len(ordered) > LINES:
        say(f"and {len(ordered) - LINES} other causes")
    invalid = sum(row["failure_class"] == FailureClass.TASK_INVALID for row in missing)
    if invalid:
        say(f"{invalid} with an invalid task: another try cannot help; correct the task record")
    say(f"hint: rollouts show {ordered[0][1][0]['id']}")


async def _why_masked(history: History, rollout_id: str) -> str:
    """Return what the grader wrote about a grade that gives no number."""
    grades = await history.of_rollout("grades", rollout_id)
    if not grades:
        return "no message is stored"
    last = grades[-1]
    return str(last["error_text"] or f"the task itself is in doubt (evidence: {last['evidence'] or 'none'})")
