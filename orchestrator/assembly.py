"""What one process needs to work on rollouts, put together in one place: store, heartbeat, clocks, ids."""

from __future__ import annotations

import asyncio
import os
import random
import time
import uuid
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from orchestrator import identity, states
from orchestrator.rollout import Runtime
from store.heartbeat import Heartbeat
from store.rollouts import Store
from store.workers import this_process

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from orchestrator.agents.base import Endpoint
    from orchestrator.sandbox.base import SandboxProvider
    from orchestrator.settings import Settings
    from orchestrator.states import State
    from store.history import Record


def new_id() -> str:
    """Return an id that is unique for ever and sorts by time."""
    return identity.uuid7(time.time_ns() // 1_000_000, os.urandom(10))


async def open_store(url: str) -> Store:
    """Open or create the database and register this process as a worker; the caller closes it.

    Raises `store.errors.StoreUnusable` or `StoreUnreachable`.
    """
    return await Store.open(
        url,
        worker=await asyncio.to_thread(this_process, new_id()),
        edges=[(source.value, trigger, to.value) for (source, trigger), to in states.EDGES.items()],
        new_uuid=str(uuid.uuid4()),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Worker:
    """A process as the store knows it: an open store, and a heartbeat that keeps its leases alive."""

    store: Store
    heartbeat: Heartbeat

    @classmethod
    async def start(cls, url: str) -> Worker:
        """Open or create the database; raises `store.errors.StoreUnusable` or `StoreUnreachable`."""
        store = await open_store(url)
        heartbeat = Heartbeat(store)
        await heartbeat.__aenter__()
        return cls(store=store, heartbeat=heartbeat)

    async def stop(self) -> None:
        """End the heartbeat and close the store."""
        await self.heartbeat.__aexit__()
        await self.store.close()

    def runtime(
        self,
        provider: SandboxProvider,
        endpoint_of: Callable[[Record, Settings], Endpoint],
        *,
        on_cancel: Literal["interrupt", "fail"] = "interrupt",
        on_move: Callable[[str, State], None] = lambda _rollout_id, _state: None,
    ) -> Runtime:
        """Return a runtime with this machine's clock, ids and randomness."""
        return Runtime(
            store=self.store,
            heartbeat=self.heartbeat,
            provider=provider,
            endpoint_of=endpoint_of,
            new_id=new_id,
            monotonic=time.monotonic,
            random=random.random,
            on_cancel=on_cancel,
            on_move=on_move,
        )


@asynccontextmanager
async def working(url: str) -> AsyncIterator[Worker]:
    """Be a worker for as long as the context lasts."""
    worker = await Worker.start(url)
    try:
        yield worker
    finally:
        await worker.stop()
