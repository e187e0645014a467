"""What the calls of one event loop share: the store, the providers, the walks under way, and what is still cleaned up."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from orchestrator import assembly, errors, recovery, rollout, settings
from orchestrator.entry.watch import Preflight, Watch
from orchestrator.states import TERMINAL, State

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from orchestrator.agents.base import Endpoint
    from orchestrator.rollout import Ending, Runtime
    from orchestrator.sandbox.base import SandboxProvider
    from orchestrator.settings import Settings

logger = logging.getLogger(__name__)

SESSION_TTL_S = 900.0
"""Nobody else can continue a rollout whose model answers only its caller, so its lease may last."""
_ATTACHED_POLL_S = 1.0
_RELEASED_S = 5.0
"""How long a graded rollout's callers wait for its release, so that in the usual case all is over when they go on."""
_CLOSING_S = 30.0


@dataclass(slots=True)
class _Walk:
    """One rollout under way in this process, and how many calls wait for it."""

    task: asyncio.Task[Ending]
    late: asyncio.Future[None]
    """Done when the rollout has been graded for so long that its callers need not wait for the release."""
    until_s: float
    """When (monotonic) they have to be answered at the latest."""
    waiting: int = 0


@dataclass(slots=True)
class Shared:
    """One open database in one event loop."""

    worker: assembly.Worker
    run_id: str
    """Names this process's part of the run: a trainer counts its tasks from 0 again at every start."""
    runtimes: dict[str, Preflight[Runtime]] = field(default_factory=dict)
    """Sandbox settings -> runtime: each configuration may want its own kind of sandbox."""
    endpoints: dict[str, Endpoint] = field(default_factory=dict)
    """Rollout id -> endpoint with its key; lives in memory only, and only as long as the walk."""
    walks: dict[str, _Walk] = field(default_factory=dict)
    background: set[asyncio.Task[Any]] = field(default_factory=set)
    upkeep: list[asyncio.Task[None]] = field(default_factory=list)
    """Settles what dead workers left, and releases that wait, beside the calls."""

    async def runtime(self, chosen: Settings) -> Runtime:
        """Return the runtime for these settings' sandboxes; raises `PreflightFailed`."""
        key = chosen.sandbox.model_dump_json()
        if key not in self.runtimes:
            self.runtimes[key] = Preflight(lambda: self._ready(chosen), time.monotonic)
        return await self.runtimes[key].get()

    async def _ready(self, chosen: Settings) -> Runtime:
        """Check that sandboxes can be made and listed before the first one is, then look after them."""
        from orchestrator.sandbox import registry

        provider = registry.make(chosen.sandbox, cache_dir=settings.cache_dir())
        await provider.preflight()
        await provider.list_ours(f"rw-{self.worker.store.uuid[:8]}")
        runtime = self.worker.runtime(
            provider,
            lambda row, _settings: self.endpoints[row["id"]],
            on_cancel="fail",
            in_background=self.do_later,
            on_move=self._moved,
        )
        self.upkeep.append(asyncio.create_task(self._keep_up(provider), name="upkeep"))
        return runtime

    async def _keep_up(self, provider: SandboxProvider) -> None:
        runtime = self.worker.runtime(
            provider, lambda row, _settings: self.endpoints[row["id"]], serves_sessions=False
        )
        await recovery.heal(runtime)
        await recovery.keep_releasing(runtime)

    def do_later(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[None]:
        """Do work beside the calls; its failures are logged, and `close` waits for it."""
        task = asyncio.create_task(_logged(work))
        self.background.add(task)
        task.add_done_callback(self.background.discard)
        return task

    async def walk(
        self, runtime: Runtime, rollout_id: str, endpoint: Endpoint, *, until_s: float = math.inf
    ) -> Ending:
        """Walk a rollout, or wait for whoever walks it already, and return how it ended.

        A release that takes long, or past `until_s` (monotonic), goes on without its callers. Cancelling the last call that waits in this process stops
        the walk; `stopped` waits until that is written down.
        """
        found = self.walks.get(rollout_id)
        if (
            found is not None and found.task.cancelling()
        ):  # its last caller left; this one hears what came of it
            await asyncio.wait([found.task])
            return await rollout.answer(runtime.store, rollout_id)
        if found is None:
            self.endpoints[rollout_id] = endpoint
            task = asyncio.create_task(_walked(runtime, rollout_id), name=f"walk-{rollout_id}")
            found = self.walks[rollout_id] = _Walk(task, asyncio.get_running_loop().create_future(), until_s)
            task.add_done_callback(lambda _: self._forget(rollout_id))
        found.waiting += 1
        either: set[asyncio.Future[Any]] = {found.task, found.late}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if found.task.done() and not found.task.cancelled():
                return found.task.result()
            return await rollout.answer(runtime.store, rollout_id)
        except asyncio.CancelledError:
            if found.waiting == 1:
                found.task.cancel()
            raise
        finally:
            found.waiting -= 1

    async def stopped(self, rollout_id: str) -> bool:
        """Return true when nobody here walks the rollout any more, false when others still wait for it."""
        found = self.walks.get(rollout_id)
        if found is not None and found.waiting:
            return False
        if found is not None:
            await asyncio.wait([found.task])
        return True

    def _moved(self, rollout_id: str, state: State) -> None:
        found = self.walks.get(rollout_id)
        if found is not None and state is State.GRADED:
            left_s = max(0.0, min(_RELEASED_S, found.until_s - time.monotonic()))
            asyncio.get_running_loop().call_later(left_s, _ring, found.late)

    def _forget(self, rollout_id: str) -> None:
        self.walks.pop(rollout_id, None)
        self.endpoints.pop(rollout_id, None)

    async def close(self) -> None:
        """Finish what is being cleaned up, within a bounded time, and let go of everything."""
        going = [*self.upkeep, *(walk.task for walk in self.walks.values())]
        for task in going:
            task.cancel()
        await asyncio.gather(*going, return_exceptions=True)
        if self.background:
            await asyncio.wait(self.background, timeout=_CLOSING_S)
        for opened in self.runtimes.values():
            if opened.opened is not None:
                await opened.opened.provider.close()
        await self.worker.stop()


async def _walked(runtime: Runtime, rollout_id: str) -> Ending:
    """Walk to the end; where somebody else has the rollout, wait until that one is through or gone."""
    while True:
        ending = await rollout.run(runtime, rollout_id)
        if ending.state in TERMINAL or ending.stats is not None:
            return ending
        await asyncio.sleep(_ATTACHED_POLL_S)


def _ring(late: asyncio.Future[None]) -> None:
    if not late.done():
        late.set_result(None)


async def _logged(work: Coroutine[Any, Any, Any]) -> None:
    try:
        await work
    except errors.RolloutsError as e:
        logger.warning("what is done after a call is not finished; `rollouts clean` finishes it: %s", e)
    except Exception:
        logger.exception("what is done after a call failed; sandboxes of it are left to `rollouts clean`")


@dataclass(slots=True)
class Loop:
    """Everything of one event loop."""

    watch: Watch = field(default_factory=lambda: Watch(time.monotonic))
    stores: dict[str, Preflight[Shared]] = field(default_factory=dict)
    """Database URL -> what is shared there."""


_loops: dict[asyncio.AbstractEventLoop, Loop] = {}
_leaving: set[asyncio.Task[None]] = set()


def of_this_loop() -> Loop:
    """Return what the running event loop shares; what closed ones left open is let go of."""
    here = asyncio.get_running_loop()
    if here not in _loops:
        for closed in [loop for loop in _loops if loop.is_closed()]:
            for store in _loops.pop(closed).stores.values():
                if store.opened is not None:
                    task = here.create_task(store.opened.worker.stop(), name="leave")
                    _leaving.add(task)
                    task.add_done_callback(_leaving.discard)
    return _loops.setdefault(here, Loop())


async def opened(url: str) -> Shared:
    """Return the shared store at `url`, opened by the first call; raises `PreflightFailed`."""
    stores = of_this_loop().stores
    if url not in stores:
        stores[url] = Preflight(lambda: _open(url), time.monotonic)
    return await stores[url].get()


async def _open(url: str) -> Shared:
    """Open the store; that writes and reads, so it fails where either is impossible."""
    worker = await assembly.Worker.start(url, ttl_s=SESSION_TTL_S)
    return Shared(worker=worker, run_id=f"areal-{worker.store.worker.worker_id}")


async def close() -> None:
    """Let go of what this event loop holds open; the next call opens it anew."""
    loop = _loops.pop(asyncio.get_running_loop(), None)
    for store in [] if loop is None else loop.stores.values():
        if store.opened is not None:
            with suppress(asyncio.CancelledError):
                await store.opened.close()
