"""Keeps this process's leases alive from a thread and a connection of its own, so that a busy event loop loses none.

A loop that hangs must lose them: its leases are not renewed once it has not ticked for half their time to live.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import sqlalchemy as sa

from store import engine, failpoints, leases
from store.dialect import is_trouble

if TYPE_CHECKING:
    from collections.abc import Callable

    from store.rollouts import Store
    from store.rows import Lease

logger = logging.getLogger(__name__)

_SAY_EVERY_S = 30.0
_RETRY_S = 1.0
_LONGEST_PERIOD_S = 20.0
"""However long leases last: the sign of life tells others, and a request to cancel is heard with it."""
_ENDING_S = 1.0
"""How long the end waits for a renewal that hangs in the database; the thread does not keep the process alive."""


def boot_s() -> float:
    """Return seconds since boot, suspension included: the monotonic clock stands still while a machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(slots=True)
class _Held:
    lease: Lease
    lost: Callable[[str], None]
    loop: asyncio.AbstractEventLoop
    sure_s: float
    """When the lease was last known to be ours; it lasts for a time to live from then at least."""


@dataclass(slots=True)
class _Pulse:
    """When an event loop last showed that it runs."""

    at_s: float
    asked: bool = False


@dataclass(slots=True)
class _Leases:
    held: dict[str, _Held] = field(default_factory=dict)
    pulses: dict[asyncio.AbstractEventLoop, _Pulse] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Heartbeat:
    """Renews every held lease each third of its time to live. Use as an async context.

    A lease that ran out while the store or this process was away is taken back when nobody claimed it meanwhile.
    """

    def __init__(self, store: Store, *, clock: Callable[[], float] = boot_s) -> None:
        self._store = store
        self._clock = clock
        self._leases = _Leases()
        self._stop = threading.Event()
        self._said_s = float("-inf")
        self._engine: sa.Engine | None = None
        self._ticket = engine.ticket(store.url)
        self._thread: threading.Thread | None = None

    async def __aenter__(self) -> Self:
        self._engine = self._open()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, _ENDING_S)
        elif self._engine is not None:
            self._engine.dispose()

    def hold(self, lease: Lease, lost: Callable[[str], None]) -> None:
        """Renew `lease` from now on; `lost` is called once on this loop, with `lost` or `cancelled`."""
        loop = asyncio.get_running_loop()
        with self._leases.lock:
            now_s = self._clock()
            self._leases.held[lease.rollout_id] = _Held(lease, lost, loop, now_s)
            self._leases.pulses.setdefault(loop, _Pulse(now_s)).at_s = now_s

    def is_sure(self, lease: Lease) -> bool:
        """Say whether nobody can have claimed the rollout: the lease has not run out since it was last known to be ours.

        A process that stood still, or whose store is away, is not sure until its next renewal.
        """
        with self._leases.lock:
            held = self._leases.held.get(lease.rollout_id)
            if held is None or held.lease.fence != lease.fence:
                return False
            return self._clock() - held.sure_s < self._store.ttl_s

    def drop(self, lease: Lease) -> None:
        """Stop renewing."""
        with self._leases.lock:
            held = self._leases.held.get(lease.rollout_id)
            if held is not None and held.lease.fence == lease.fence:
                del self._leases.held[lease.rollout_id]

    def _open(self) -> sa.Engine:
        return engine.write_engine(self._store.url, busy_ms=engine.WRITER_BUSY_MS)

    def _run(self) -> None:
        period_s = min(self._store.ttl_s / 3, _LONGEST_PERIOD_S)
        pause_s = period_s
        while not self._stop.wait(pause_s):
            try:
                pause_s = period_s if self.beat() else min(_RETRY_S, period_s)
            except Exception:
                logger.exception("a renewal of leases failed; trying again")
                pause_s = min(_RETRY_S, period_s)
        if self._engine is not None:
            self._engine.dispose()
        self._ticket.close()

    def beat(self) -> bool:
        """Renew everything once, False when the database was away; called by the thread, and by tests in its place."""
        now_s = self._clock()
        with self._leases.lock:
            held = [h for h in self._leases.held.values() if self._ticks(h, now_s)]
        try:
            kept = self._extend(held)
        except sa.exc.DBAPIError as e:
            if not is_trouble(e):
                raise
            if now_s - self._said_s >= _SAY_EVERY_S:
                self._said_s = now_s
                logger.warning("leases cannot be renewed: %s", e.orig)
            return False
        for h in held:
            why = (
                "lost" if h.lease.rollout_id not in kept else "cancelled" if kept[h.lease.rollout_id] else ""
            )
            if why:
                self._tell(h, why)
            else:
                h.sure_s = now_s
        return True

    def _ticks(self, held: _Held, now_s: float) -> bool:
        """Say whether the lease's loop has run lately, and ask it for the next sign of life."""
        pulse = self._leases.pulses[held.loop]
        if pulse.asked:  # without an unanswered question, silence says only that this thread was held up
            return now_s - pulse.at_s < self._store.ttl_s / 2
        pulse.asked = True

        def tick() -> None:
            pulse.at_s, pulse.asked = self._clock(), False

        try:
            held.loop.call_soon_threadsafe(tick)
        except RuntimeError:
            return False
        return True

    def _extend(self, held: list[_Held]) -> dict[str, bool]:
        if self._engine is None:
            self._engine = self._open()
        pairs = [(h.lease.rollout_id, h.lease.fence) for h in held]
        ttl_ms = round(self._store.ttl_s * 1000)
        worker_id, dialect = self._store.worker.worker_id, self._store.dialect
        with self._ticket(self._stop.is_set), self._engine.begin() as connection:
            kept = leases.renew(connection, dialect, worker_id, pairs, ttl_ms=ttl_ms)
            ran_out = [pair for pair in pairs if pair[0] not in kept]
            kept |= leases.reacquire(connection, dialect, worker_id, ran_out, ttl_ms=ttl_ms)
            leases.note_alive(connection, dialect, worker_id)
            failpoints.hit("heartbeat.before_commit")
        failpoints.hit("heartbeat.after_commit")
        return kept

    def _tell(self, held: _Held, why: str) -> None:
        with self._leases.lock:
            current = self._leases.held.get(held.lease.rollout_id)
            if current is not held:
                return
            del self._leases.held[held.lease.rollout_id]
        try:
            held.loop.call_soon_threadsafe(held.lost, why)
        except RuntimeError:
            return  # the loop that held the lease is closed: nobody works on it
