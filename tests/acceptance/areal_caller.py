"""A trainer's worker that may be killed: `python -m tests.acceptance.areal_caller SEED FAULT_RATE` makes the calls of its input.

Each line of standard input is one call; each line of output is what a call was handed, or that it was cancelled.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from typing import Any

from aweagent.lifecycle import run_agent_with_reward
from orchestrator import entry, errors
from store import failpoints

AT_ONCE = 12


def make_trouble(rate: float, choices: random.Random) -> None:
    """Let some creates and some gradings fail, as a provider or a grader would."""

    def act(point: str) -> None:
        if choices.random() >= rate:
            return
        if point == "sandbox.before_create":
            raise errors.SandboxCreateFailed("on purpose")
        if point == "grade.after_grading":
            raise errors.GraderError("on purpose")

    failpoints.install(act)


async def call(order: dict[str, Any], places: asyncio.Semaphore) -> None:
    async with places:
        running = asyncio.create_task(run_agent_with_reward(order["record"], **order["arguments"]))
        if order["cancel_after_s"] is not None:
            asyncio.get_running_loop().call_later(order["cancel_after_s"], running.cancel)
        try:
            reward, stats = await running
            said: dict[str, Any] = {"reward": reward, "grade": stats.get("grade_outcome")}
        except asyncio.CancelledError:
            said = {"cancelled": True}
    sys.stdout.write(json.dumps({"n": order["n"], **said}) + "\n")
    sys.stdout.flush()


async def main() -> None:
    make_trouble(float(sys.argv[2]), random.Random(int(sys.argv[1])))
    places = asyncio.Semaphore(AT_ONCE)
    calls = []
    while line := await asyncio.to_thread(sys.stdin.readline):
        calls.append(asyncio.create_task(call(json.loads(line), places)))
    await asyncio.gather(*calls)
    await entry.close()


if __name__ == "__main__":
    asyncio.run(main())
