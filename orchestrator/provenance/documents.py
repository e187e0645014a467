"""The documents of a rollout: what the agent said and saw, its patch, what the tests printed. Put together from rows."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from store.history import History

_FACTS = (
    "id",
    "run_id",
    "group_id",
    "sample",
    "instance_id",
    "agent_type",
    "state",
    "failure_class",
    "failure_msg",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Documents:
    """Everything of one rollout that is worth a file; None is what it does not have."""

    instance_id: str
    result: dict[str, Any]
    transcript: bytes | None
    patch: bytes | None
    test_log: bytes | None


async def gather_documents(history: History, rollout_id: str) -> Documents | None:
    """Return the documents of a rollout, None when there is no such rollout."""
    row = await history.rollout(rollout_id)
    if row is None:
        return None
    result = {name: row[name] for name in _FACTS}
    for reward in await history.of_rollout("rewards", rollout_id):
        result |= {name: reward[name] for name in ("reward", "valid", "invalid_reason", "grade_id")}
        result["stats"] = json.loads(reward["stats"])
    return Documents(
        instance_id=row["instance_id"],
        result=result,
        transcript=await transcript(history, rollout_id),
        patch=await patch(history, rollout_id),
        test_log=await test_log(history, rollout_id),
    )


async def transcript(history: History, rollout_id: str) -> bytes | None:
    """Return the conversation of the last attempt that has one, a JSON message a line; None without any."""
    steps = await history.of_rollout("steps", rollout_id)
    if not steps:
        return None
    moves = await history.of_rollout("transitions", rollout_id)
    begun = max(move["fence"] for move in moves if move["trig"] == "start_agent")
    messages = [
        message
        for step in steps
        if step["fence"] >= begun
        for message in json.loads(step["output"])["messages"]
    ]
    return "".join(json.dumps(message, ensure_ascii=False) + "\n" for message in messages).encode(
        "utf-8", "surrogatepass"
    )


async def patch(history: History, rollout_id: str) -> bytes | None:
    """Return the patch, byte for byte; None before it is taken."""
    rows = await history.of_rollout("patches", rollout_id)
    return await history.artifact(rows[-1]["artifact"]) if rows else None


async def test_log(history: History, rollout_id: str) -> bytes | None:
    """Return the output of the tests of the effective grade, of the last one before there is a reward; None without."""
    grades = await history.of_rollout("grades", rollout_id)
    rewards = await history.of_rollout("rewards", rollout_id)
    if rewards:
        grades = [grade for grade in grades if grade["grade_id"] == rewards[0]["grade_id"]]
    return await history.artifact(grades[-1]["log"]) if grades else None
