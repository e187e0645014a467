"""Opens the store that its argument names when told so, registers as a worker, and prints the store's uuid."""

from __future__ import annotations

import asyncio
import sys
import uuid
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from orchestrator import states
from store import errors, workers
from store.rollouts import Store

EDGES = {(src.value, trigger, dst.value) for (src, trigger), dst in states.EDGES.items()}


async def main() -> None:
    sys.stdout.write("loaded\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.readline)
    store = await Store.open(
        sys.argv[1],
        worker=workers.this_process(uuid.uuid4().hex),
        edges=EDGES,
        new_uuid=uuid.uuid4().hex,
    )
    sys.stdout.write(f"{store.uuid}\n")
    with suppress(errors.StoreUnreachable):  # closing waits for its turn for seconds only
        await store.close()


asyncio.run(main())
