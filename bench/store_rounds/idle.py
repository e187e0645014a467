"""What a live rollout costs in memory while nothing happens to it: `python -m bench.store_rounds.idle URL COUNT`.

Prints bytes per rollout, from the resident set before and after, and from Python's own count.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import tracemalloc
from functools import partial
from pathlib import Path

from bench.store_rounds import workload
from store.heartbeat import Heartbeat


def _resident() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def _held(url: str, count: int, *, traced: bool) -> float:
    """Return bytes per rollout with `count` rollouts claimed, renewed, and each awaited by a task of its own."""
    store = await workload.open_store(url)
    await store.submit([workload.new_rollout(n) for n in range(1, count + 1)])
    (first,) = await store.claim(limit=1)
    async with Heartbeat(store) as heartbeat:
        lost: dict[str, str] = {}
        stop = asyncio.Event()
        heartbeat.hold(first, partial(lost.__setitem__, first.rollout_id))
        await asyncio.to_thread(heartbeat.beat)
        if traced:
            tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0] if traced else _resident()
        leases = await store.claim(limit=count)
        waiting = []
        for lease in leases:
            heartbeat.hold(lease, partial(lost.__setitem__, lease.rollout_id))
            waiting.append(asyncio.create_task(stop.wait()))
        await asyncio.to_thread(heartbeat.beat)
        await asyncio.sleep(0)
        gc.collect()
        after = tracemalloc.get_traced_memory()[0] if traced else _resident()
        if lost:
            raise RuntimeError(f"{len(lost)} idle leases were lost")
        stop.set()
        await asyncio.gather(*waiting)
    await store.close()
    return (after - before) / len(leases)


if __name__ == "__main__":
    _url, _count, _how = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    print(json.dumps({"bytes": asyncio.run(_held(_url, _count, traced=_how == "traced"))}))
