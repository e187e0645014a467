"""What one process needs to work on rollouts, put together in one place: store, heartbeat, clocks, ids."""

from __future__ import annotations

import asyncio
import os
import random
import time
import uuid
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from orchestrator import errors, identity, recovery, settings, states
from orchestrator.rollout import Runtime
from store import errors as store_errors
from store.errors import StoreError
from store.heartbeat import Heartbeat, boot_s
from store.rollouts import DEFAULT_TTL_S, Store
from store.workers import this_process

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine

    from orchestrator.agents.base import Endpoint
    from orchestrator.sandbox.base import SandboxProvider
    from orchestrator.settings import Settings
    from orchestrator.states import State
    from store.history import Record
    from store.look import Look

LookT = TypeVar("LookT", bound="Look")

__all__ = [
    "StoreError", "Worker", "clean", "look_at", "new_id", "open_existing", "open_store", "provider_named", "shown", "working",
]  # fmt: skip
"""`StoreError` is the root of the store's errors, for those who may not touch the store."""


def new_id() -> str:
    """Return an id that is unique for ever and sorts by time."""
    return identity.uuid7(time.time_ns() // 1_000_000, os.urandom(10))


async def open_store(url: str, *, ttl_s: float = DEFAULT_TTL_S) -> Store:
    """Open or create the database and register this process as a worker; the caller closes it.

    Its leases last `ttl_s` without renewal. Raises `store.errors.StoreUnusable` or `StoreUnreachable`.
    """
    return await Store.open(
        url,
        worker=await asyncio.to_thread(this_process, new_id()),
        edges=[(source.value, trigger, to.value) for (source, trigger), to in states.EDGES.items()],
        new_uuid=str(uuid.uuid4()),
        fsm_version=states.FSM_VERSION,
        ttl_s=ttl_s,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Worker:
    """A process as the store knows it: an open store, and a heartbeat that keeps its leases alive."""

    store: Store
    heartbeat: Heartbeat

    @classmethod
    async def start(cls, url: str, *, ttl_s: float = DEFAULT_TTL_S) -> Worker:
        """Open or create the database; raises `store.errors.StoreUnusable` or `StoreUnreachable`."""
        store = await open_store(url, ttl_s=ttl_s)
        heartbeat = Heartbeat(store)
        await heartbeat.__aenter__()
        return cls(store=store, heartbeat=heartbeat)

    @classmethod
    async def start_existing(cls, url: str) -> Worker:
        """Open a database that is there already; raises `errors.NothingKnown`."""
        store = await open_existing(url)
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
        serves_sessions: bool = True,
        in_background: Callable[[Coroutine[Any, Any, Any]], object] | None = None,
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
            elapsed=boot_s,
            random=random.random,
            on_cancel=on_cancel,
            serves_sessions=serves_sessions,
            in_background=in_background,
            on_move=on_move,
        )


async def open_existing(url: str) -> Store:
    """Open a database that is there already: a new one would know of nothing, and prove nothing.

    Raises `errors.NothingKnown`, also when it cannot be reached or used.
    """
    return await _existing(url, lambda _known: open_store(url))


async def look_at(url: str) -> Look:
    """Open a database that is there already to read it, and leave no trace: no worker, no newer schema.

    Raises `errors.NothingKnown`, also when it cannot be reached or used, or its schema is an older one.
    """
    from store import engine, revisions
    from store.look import look

    async def opened(known: str) -> Look:
        if known < revisions.newest():
            raise errors.NothingKnown(
                f"{engine.shown(engine.parse_url(url))} is at schema {known}, which only looking does not change",
                hint="run `rollouts db upgrade` first",
            )
        return await look(url, worker=await asyncio.to_thread(this_process, new_id()))

    return await _existing(url, opened)


async def _existing(url: str, opened: Callable[[str], Awaitable[LookT]]) -> LookT:
    """Open a database with what takes its revision, unless it is none of ours yet."""
    from store import engine, soundness

    try:
        known = await asyncio.to_thread(soundness.standing, url)
        if known is not None:
            return await opened(known)
    except store_errors.StoreError as e:
        raise errors.NothingKnown(f"nothing is proven: {e}", hint=e.hint) from e
    raise errors.NothingKnown(
        f"nothing is proven: {engine.shown(engine.parse_url(url))} holds no rollouts",
        hint="name the database that the rollouts were written to with --db or ROLLOUTS_DATABASE_URL",
    )


def shown(url: str) -> str:
    """Return a database's URL for people: without its password."""
    from store import engine

    return engine.shown(engine.parse_url(url))


def provider_named(name: str) -> SandboxProvider:
    """Return a provider that can list and release, whatever settings its sandboxes were made with.

    Raises `errors.UsageError` for a name nobody knows.
    """
    from orchestrator.sandbox import registry

    if name not in registry.PROVIDER_NAMES:
        raise errors.UsageError(
            f"there is no sandbox provider called {name!r}",
            hint=f"this program knows: {', '.join(registry.PROVIDER_NAMES)}",
        )
    chosen = settings.SandboxSettings.model_validate({"provider": name, "allow_no_isolation": True})
    return registry.make(chosen, cache_dir=settings.cache_dir())


def _present_ref(name: str) -> str | None:
    """Return the authority that a provider of this machine makes sandboxes under now, None without one."""
    try:
        return provider_named(name).ref
    except (errors.RolloutsError, OSError):
        return None


async def clean(
    url: str, *, dry_run: bool = False, every: bool = False, limit_s: float = 540.0
) -> recovery.Cleaned:
    """Sweep an existing database's sandboxes (see `recovery.clean`), or only say what would become of them.

    Raises as `open_existing` and `look_at` do.
    """
    from orchestrator.sandbox import registry

    store = await (look_at(url) if dry_run else open_existing(url))
    try:
        provider_of = cache(provider_named)
        also = [(name, ref) for name in registry.PROVIDER_NAMES if (ref := _present_ref(name))]
        if isinstance(store, Store):
            return await recovery.clean(store, provider_of, every=every, also=also, limit_s=limit_s)
        return await recovery.would_clean(store, provider_of, every=every, also=also)
    finally:
        await store.close()


@asynccontextmanager
async def working(url: str) -> AsyncIterator[Worker]:
    """Be a worker for as long as the context lasts."""
    worker = await Worker.start(url)
    try:
        yield worker
    finally:
        await worker.stop()
