"""A process that works on its own rollouts through the same SQLite file as a test, as a second worker on a host does.

Reads `begin URL` and `end` from its input, line by line; answers `ready` once it wrote, and with what came of it.
"""

from __future__ import annotations

import asyncio
import json
import sys
import uuid
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from orchestrator import states
from store import rows, workers
from store.rollouts import Store

EDGES = {(src.value, trigger, dst.value) for (src, trigger), dst in states.EDGES.items()}

_PAUSE_S = 0.01
"""Leaves the machine to the tests for half of the time."""


def _new() -> rows.NewRollout:
    name = uuid.uuid4().hex
    return rows.NewRollout(
        id=f"noise-{name}", idem_key=name, request_sha256="request", run_id="noise", instance_id="noise",
        task_sha256="noise", task_json="{}", dataset_kind="local", eval_sha256="eval", agent_type="swe",
        config_sha256="config", endpoint_kind="stateless", input={}, fsm_version=1, outcome_table=1,
    )  # fmt: skip


async def _one(store: Store, lease: rows.Lease) -> int:
    """Claimed, moved, stepped, failed; returns how many of its writes were refused."""
    moved = await store.transition(lease, "provision", op_id="p")
    stepped = await store.record(lease, [rows.StepRow(name="one", output={"noise": lease.fence})])
    ended = await store.transition(
        rows.Lease(
            rollout_id=lease.rollout_id, fence=lease.fence, attempt_no=1, version=1, state="", previous=None
        ),
        "fail",
        op_id="f",
        failure=("internal", "noise"),
    )
    return sum(not isinstance(outcome, rows.Applied) for outcome in (moved, stepped, ended))


async def _round(store: Store) -> int:
    await store.submit([_new() for _ in range(4)])
    leases = await store.claim(limit=4, run_id="noise")
    return sum(await asyncio.gather(*(_one(store, lease) for lease in leases)))


async def _answer(line: str) -> None:
    await asyncio.to_thread(print, line, flush=True)


async def main() -> None:
    while words := (await asyncio.to_thread(sys.stdin.readline)).split():
        store = await Store.open(
            words[1],
            worker=workers.this_process(uuid.uuid4().hex),
            edges=EDGES,
            new_uuid="0123456789abcdef0123456789abcdef",
        )
        refused, rounds = await _round(store), 1
        await _answer("ready")
        end = asyncio.create_task(asyncio.to_thread(sys.stdin.readline))
        while not end.done():
            refused += await _round(store)
            rounds += 1
            await asyncio.sleep(_PAUSE_S)
        await store.close()
        await _answer(json.dumps({"rounds": rounds, "refused": refused}))


asyncio.run(main())
