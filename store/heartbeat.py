"""Keeps this process's leases alive and says at once when one is lost or a person asked to cancel."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Self

from store import errors
from store.rollouts import DEFAULT_TTL_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from store.rollouts import Store
    from store.rows import Lease

logger = logging.getLogger(__name__)


class Heartbeat:
    """Renews every held lease each third of its time to live. Use as an async context."""

    def __init__(self, store: Store, *, ttl_s: float = DEFAULT_TTL_S) -> None:
        self._store = store
        self._ttl_s = ttl_s
        self._held: dict[str, tuple[Lease, Callable[[str], None]]] = {}
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run(), name="heartbeat")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def hold(self, lease: Lease, lost: Callable[[str], None]) -> None:
        """Renew `lease` from now on; `lost` is called once, with `lost` or `cancelled`, when the work must stop."""
        self._held[lease.rollout_id] = (lease, lost)

    def drop(self, lease: Lease) -> None:
        """Stop renewing."""
        held = self._held.get(lease.rollout_id)
        if held is not None and held[0].fence == lease.fence:
            del self._held[lease.rollout_id]

    async def beat(self) -> None:
        """Renew everything once."""
        held = dict(self._held)
        kept = await self._store.heartbeat([lease for lease, _ in held.values()], ttl_s=self._ttl_s)
        for rollout_id, (lease, lost) in held.items():
            why = "lost" if rollout_id not in kept else "cancelled" if kept[rollout_id] else ""
            current = self._held.get(rollout_id)
            if why and current is not None and current[0] is lease:
                del self._held[rollout_id]
                lost(why)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._ttl_s / 3)
            try:
                await self.beat()
            except errors.StoreUnreachable as e:
                logger.warning("leases were not renewed: %s", e)
