"""A second container on the same machine, with the same host name and boot id: it takes nothing from a live neighbour."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from typing import TYPE_CHECKING

import pytest

from store import rows
from tests.integration.durability import operations
from tests.integration.durability.forking import ROOT

if TYPE_CHECKING:
    from store.rollouts import Store
    from tests.conftest import Database

NEIGHBOUR = """
import asyncio, json, sys
from tests.integration.durability.scenarios import open_store

async def main():
    store = await open_store(sys.argv[1])
    taken = await store.take_from_dead()
    claimed = await store.claim(limit=9)
    given_up = await store.give_up_ownerless()
    dead = await store.is_dead(sys.argv[2])
    await store.close()
    print(json.dumps([taken, [lease.rollout_id for lease in claimed], given_up, dead]))

asyncio.run(main())
"""


async def tell(*prefix: str, database: Database, worker_id: str) -> list[object]:
    process = await asyncio.create_subprocess_exec(
        *prefix, sys.executable, "-c", NEIGHBOUR, database.url, worker_id, cwd=ROOT,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    said, why = await process.communicate()
    if process.returncode and b"Operation not permitted" in why:
        pytest.skip(f"this machine makes no PID namespace: {why.decode().strip()}")
    assert process.returncode == 0, why.decode()
    return list(json.loads(said))


async def test_another_pid_namespace_takes_nothing_from_a_live_worker(worker: Store, database: Database):
    if shutil.which("unshare") is None:
        pytest.skip("this machine has no unshare")
    await worker.submit([operations.new_rollout("z1")])
    (lease,) = await worker.claim(limit=1)
    await worker.record(lease, [operations.intent("z1-box1")])
    neighbour = ("unshare", "--pid", "--fork", "--mount-proc")
    found = await tell(*neighbour, database=database, worker_id=worker.worker.worker_id)
    assert found == [[], [], [], False]
    assert isinstance(await worker.record(lease), rows.Applied)
