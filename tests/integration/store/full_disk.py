"""Writes until its disk is full, waits for room, goes on; prints every step it was told is durable, and what it met.

Arguments: the folder of the database, the size in KiB to leave free, the outage in seconds that its store waits out.
The folder is on a small file system, which a ballast file fills.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from orchestrator import states
from store import errors, rows, workers
from store.rollouts import Store

EDGES = {(src.value, trigger, dst.value) for (src, trigger), dst in states.EDGES.items()}


async def main(folder: Path, outage_s: float) -> None:
    store = await Store.open(
        f"sqlite:///{folder / 'rollouts.db'}",
        worker=workers.this_process("w"),
        edges=EDGES,
        new_uuid="u",
        outage_s=outage_s,
    )
    await store.submit(
        [
            rows.NewRollout(
                id="r", idem_key="k", request_sha256="q", run_id="run", instance_id="i", task_sha256="t", task_json="{}",
                dataset_kind="local", eval_sha256="e", agent_type="swe", config_sha256="c", endpoint_kind="stateless",
                input={}, fsm_version=1, outcome_table=1,
            )
        ]
    )  # fmt: skip
    (lease,) = await store.claim(limit=1, ttl_s=600)
    told: list[object] = []
    ballast = folder / "ballast"
    fill(ballast)
    done, met = 0, ""
    pending: asyncio.Task[rows.Outcome] | None = None
    while pending is None:
        writing = asyncio.create_task(store.record(lease, [step(done)]))
        try:
            told.append(type(await asyncio.wait_for(asyncio.shield(writing), 1.5)).__name__)
            done += 1
        except TimeoutError:
            pending = writing
        except errors.StoreUnreachable as e:
            met, pending = str(e), asyncio.create_task(store.record(lease, [step(done)]))
    ballast.unlink()
    told.append(type(await pending).__name__)
    told += [type(await store.record(lease, [step(n)])).__name__ for n in range(done + 1, done + 4)]
    await store.close()
    sys.stdout.write(json.dumps({"before": done, "steps": done + 4, "told": told, "met": met}))


def step(number: int) -> rows.StepRow:
    return rows.StepRow(name=f"{number:04}", output={"noise": os.urandom(4000).hex()})


def fill(ballast: Path) -> None:
    """Leave less room than a few steps need."""
    with ballast.open("wb", buffering=0) as f:
        room = os.statvfs(ballast).f_bavail * os.statvfs(ballast).f_frsize - 60_000
        f.write(bytes(room))


asyncio.run(main(Path(sys.argv[1]), float(sys.argv[2])))
