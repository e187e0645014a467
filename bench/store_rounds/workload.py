"""What every contender does: walk rollouts around the state machine, one durable, logged transition at a time.

A transition is a compare-and-set of the rollout's row and one log row of about 200 bytes, on the schema of our migrations.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import uuid
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from orchestrator import states
from store import rows, workers
from store.rollouts import Store

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

EDGES = frozenset((src.value, trigger, dst.value) for (src, trigger), dst in states.EDGES.items())
CYCLE = (
    ("created", "provision", "sandbox_ready"),
    ("sandbox_ready", "start_agent", "agent_running"),
    ("agent_running", "take_patch", "patched"),
    ("patched", "restart", "created"),
)
"""Four moves that lead back to the start, so that a round never runs out of rollouts."""
PAYLOAD = {"note": "x" * 100}
PAYLOAD_JSON = rows.canonical_json(PAYLOAD)
ROLLOUTS = 2000
LONG_S = 86_400.0
"""A lease that outlasts every round."""


@dataclass(slots=True)
class Walked:
    """One rollout on its way around the cycle, as its owner knows it."""

    rollout_id: str
    fence: int
    version: int = 0

    @property
    def move(self) -> tuple[str, str, str]:
        """The (source, trigger, destination) that comes next."""
        return CYCLE[self.version % len(CYCLE)]


def new_rollout(number: int, **columns: Any) -> rows.NewRollout:  # noqa: ANN401 - columns of several types
    """Describe the rollout with this number; keyword arguments replace columns."""
    base: dict[str, Any] = {
        "id": str(uuid.UUID(int=number)), "idem_key": f"{number:064x}", "request_sha256": "0" * 64,
        "run_id": "bench", "instance_id": "bench__bench-1", "task_sha256": "0" * 64, "task_json": "{}",
        "dataset_kind": "local", "eval_sha256": "0" * 64, "agent_type": "swe", "config_sha256": "0" * 64,
        "endpoint_kind": "stateless", "input": {}, "fsm_version": 1, "outcome_table": 1,
    }  # fmt: skip
    return rows.NewRollout(**(base | columns))


async def open_store(url: str, **options: Any) -> Store:  # noqa: ANN401 - handed on
    """Open the store as a worker of its own."""
    return await Store.open(
        url,
        worker=workers.this_process(uuid.uuid4().hex),
        edges=EDGES,
        new_uuid=uuid.uuid4().hex,
        **options,
    )


async def claimed(store: Store, count: int = ROLLOUTS) -> list[rows.Lease]:
    """Submit `count` rollouts and claim them for longer than any round takes."""
    await store.submit([new_rollout(n) for n in range(1, count + 1)])
    return await store.claim(limit=count, ttl_s=LONG_S)


class Walkers:
    """Walks leases through the public interface of the store."""

    def __init__(self, store: Store, leases: list[rows.Lease]) -> None:
        self._store = store
        self._leases = leases
        self._op = 0
        self.refused: list[rows.Outcome] = []
        """Answers that a sole owner with live leases must never get."""

    async def round(self, seconds: float, tasks: int) -> int:
        """Keep `tasks` callers waiting for transitions for a while; return how many were acknowledged."""
        deadline = time.perf_counter() + seconds
        return sum(await asyncio.gather(*(self._walk(n, tasks, deadline) for n in range(tasks))))

    async def _walk(self, first: int, step: int, deadline: float) -> int:
        """Move the leases first, first + step, ... in turn until time is up."""
        done = 0
        mine = range(first, len(self._leases), step)
        while True:
            for n in mine:
                if time.perf_counter() >= deadline:
                    return done
                lease = self._leases[n]
                trigger = CYCLE[lease.version % len(CYCLE)][1]
                self._op += 1
                outcome = await self._store.transition(
                    lease, trigger, op_id=f"{self._op:032x}", payload=PAYLOAD
                )
                if not isinstance(outcome, rows.Applied):
                    self.refused.append(outcome)
                    return done
                self._leases[n] = replace(lease, version=outcome.version, state=outcome.state)
                done += 1


async def serve(round_of: Callable[[float, int], Awaitable[dict[str, Any]]]) -> None:
    """Run one round per line of standard input ({"seconds": s, "tasks": n}); answer each with a line of JSON.

    The loop stays free while it waits, so that heartbeats see it alive.
    """
    print(json.dumps({"ready": True}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        wanted = json.loads(line)
        started = time.perf_counter()
        result = await round_of(wanted["seconds"], wanted["tasks"])
        print(json.dumps({"seconds": time.perf_counter() - started} | result), flush=True)
