"""A database as somebody sees it who only looks: nothing can be written, and nobody is registered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from store import engine, workers
from store.history import History

if TYPE_CHECKING:
    import sqlalchemy as sa

    from store.workers import WorkerIdentity


class Look:
    """One open database, its past, and who of its workers lives; `close` it."""

    def __init__(self, url: sa.URL, *, worker: WorkerIdentity, uuid: str, history: History) -> None:
        self.url = url
        self.worker = worker
        """The process that asks."""
        self.uuid = uuid
        self.history = history

    async def close(self) -> None:
        """Let go of every connection. Harmless when repeated."""
        await self.history.close()

    async def is_dead(self, worker_id: str) -> bool:
        """Say whether a worker is provably dead, as far as this process can see."""
        row = await self.history.worker(worker_id)
        return row is not None and workers.runs(workers.Recorded.of(row), self.worker) is False

    async def may_live(self, worker_id: str) -> bool:
        """Say whether a worker has not ended on its own and is not provably dead."""
        row = await self.history.worker(worker_id)
        return row is not None and not row["stopping"] and not await self.is_dead(worker_id)


async def look(url: str, *, worker: WorkerIdentity) -> Look:
    """Open a database of the newest schema, as `soundness.standing` tells it, to read it.

    Raises `errors.StoreUnusable` or `StoreUnreachable`.
    """
    history = History.of(url)
    try:
        return Look(engine.parse_url(url), worker=worker, uuid=await history.store_uuid(), history=history)
    except BaseException:
        await history.close()
        raise
