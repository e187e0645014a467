"""An agent's steps as rows, and back: what one worker recorded is what the next one continues from."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from orchestrator.agents.base import LlmCall, Step
from store import rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from store.history import History, Record

_CALL = (
    "kind", "outcome", "request_sha256", "response_id", "model", "http_status", "finish_reason", "prompt_tokens",
    "completion_tokens", "cached_tokens", "duration_ms", "error",
)  # fmt: skip
_COUNTS = ("tool_calls", "format_errors", "command_timeouts", "truncated_observations", "tool_ms")


def call_rows(step: str, calls: Sequence[LlmCall]) -> list[rows.Row]:
    """Return the stored form of the calls of one step."""
    return [rows.LlmCallRow(step=step, **{name: getattr(call, name) for name in _CALL}) for call in calls]


def step_row(step: Step) -> rows.StepRow:
    """Return the stored form of a completed step."""
    counts = {name: getattr(step, name) for name in _COUNTS}
    output = {"messages": step.messages} | ({"sandbox_lost": True} if step.lost else {})
    return rows.StepRow(name=step.name, output=output, **counts)


async def since(history: History, rollout_id: str, fence: int) -> tuple[list[Record], list[Record]]:
    """Return the rows of steps and calls from this fence on: one agent's work, whoever's hands it went through."""
    steps = await history.of_rollout("steps", rollout_id)
    calls = await history.of_rollout("llm_calls", rollout_id)
    return [s for s in steps if s["fence"] >= fence], [c for c in calls if c["fence"] >= fence]


async def has_asked(history: History, rollout_id: str) -> bool:
    """Say whether the model may have been asked for this rollout, by whoever's hands."""
    attempts = await history.of_rollout("attempts", rollout_id)
    return any(row["asked_at"] is not None for row in attempts) or bool(
        await history.of_rollout("llm_calls", rollout_id)
    )


def restored(steps: Sequence[Record], calls: Sequence[Record]) -> list[Step] | None:
    """Return the steps of an attempt that a dead worker left, None when its sandbox may be ahead of them.

    It may be when an answer was recorded and its step was not: some of what the answer asks for may have been done. The
    same holds for a step in which the sandbox did not answer.
    """
    outputs = [json.loads(row["output"]) for row in steps]
    if any(output.get("sandbox_lost") for output in outputs):
        return None
    of_step: dict[str, list[LlmCall]] = {}
    for row in calls:
        of_step.setdefault(row["step"], []).append(LlmCall(**{name: row[name] for name in _CALL}))
    known = {row["name"] for row in steps}
    if any(
        name not in known and any(call.outcome == "ok" for call in made) for name, made in of_step.items()
    ):
        return None
    done = [
        Step(
            name=row["name"],
            messages=output["messages"],
            calls=of_step.get(row["name"], []),
            **{name: row[name] for name in _COUNTS},
        )
        for row, output in zip(steps, outputs, strict=True)
    ]
    unanswered = [Step(name=n, messages=[], calls=made) for n, made in of_step.items() if n not in known]
    return [*done, *unanswered]
