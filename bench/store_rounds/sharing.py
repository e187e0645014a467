"""Four processes on one SQLite file: whether each gets its share, and whether anybody loses a lease.

`python -m bench.store_rounds.sharing URL FIRST` is one of them: it serves rounds on rollouts FIRST and after, with its
heartbeat running.
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any

from bench.store_rounds import workload
from store.heartbeat import Heartbeat

if TYPE_CHECKING:
    from store import rows
    from store.rollouts import Store

PROCESSES = 4
EACH = 256
TTL_S = 6.0
"""Short, so that a round sees renewals: a process that waited too long for its turn would lose its leases."""


async def _claimed(store: Store, first: int) -> list[rows.Lease]:
    mine = [workload.new_rollout(n) for n in range(first, first + EACH)]
    await store.submit(mine)
    return await store.claim(limit=EACH, ids=[row.id for row in mine])


async def main(url: str, first: int) -> None:
    """Serve rounds; every lease is held by the heartbeat from its claim on."""
    lost: list[str] = []
    store = await workload.open_store(url, ttl_s=TTL_S)
    async with Heartbeat(store) as heartbeat:
        leases = await _claimed(store, first)
        for lease in leases:
            heartbeat.hold(lease, lost.append)
        walkers = workload.Walkers(store, leases)

        async def round_of(seconds: float, tasks: int) -> dict[str, Any]:
            return {"count": await walkers.round(seconds, tasks), "lost": len(lost) + len(walkers.refused)}

        await workload.serve(round_of)
    await store.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
