"""The store as the rest of the program uses it: durable writes by one thread, reads that never block them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Self

import sqlalchemy as sa

from store import engine, errors, leases, ledger, primitive, rows
from store.history import History
from store.schema import SQLITE_NOW
from store.writer import Writer

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from store.workers import WorkerIdentity

DEFAULT_TTL_S = 60.0


class Store:
    """One open database. `open` it, `close` it; every write is durable when its await returns.

    Writes raise `errors.StoreUnreachable` when the database failed: the outcome is then unknown and must be re-read.
    """

    def __init__(
        self, *, worker: WorkerIdentity, uuid: str, writer: Writer, history: History, now_sql: str
    ) -> None:
        self.worker = worker
        self.uuid = uuid
        self.history = history
        self._writer = writer
        self._now: sa.ColumnElement[int] = sa.literal_column(now_sql, sa.BigInteger)

    @classmethod
    async def open(
        cls,
        url: str,
        *,
        worker: WorkerIdentity,
        edges: Iterable[tuple[str, str, str]],
        new_uuid: str,
        now_sql: str = SQLITE_NOW,
    ) -> Self:
        """Open or create the database at `url` and register this worker.

        `edges` are the state machine's (source, trigger, destination); `new_uuid` names a store made by this call;
        `now_sql` is the SQL that gives epoch milliseconds. Raises `errors.StoreUnusable` or `StoreUnreachable`.
        """
        parsed = engine.parse_url(url)
        path = engine.file_of(parsed)
        writing = engine.write_engine(parsed)

        def prepare() -> str:
            engine.check_place(path, create=True)
            return engine.prepare(writing, path, set(edges), store_uuid=new_uuid)

        try:
            uuid = await asyncio.to_thread(prepare)
        except sa.exc.DatabaseError as e:
            raise errors.StoreUnusable(f"cannot open {path}: {e.orig}", hint="choose another --db") from e
        finally:
            await asyncio.to_thread(writing.dispose)
        writer = Writer(engine.write_engine(parsed), lambda: engine.ticket(path))
        store = cls(worker=worker, uuid=uuid, writer=writer, history=History(parsed), now_sql=now_sql)
        await writer.write(lambda c: leases.register(c, store._now, worker))
        return store

    async def close(self) -> None:
        """Commit what is queued, say that this worker stops, and let go of every connection."""
        try:
            await self._writer.write(lambda c: leases.stop(c, self._now, self.worker.worker_id))
        finally:
            await self._writer.close()
            await self.history.close()

    async def submit(self, new: Sequence[rows.NewRollout]) -> list[tuple[str, bool]]:
        """Insert the rollouts that are new, all or none; return (id, is new) for each, in order.

        Raises `errors.Conflict` when a key exists with another request.
        """
        records = await asyncio.to_thread(
            lambda: {row.task_sha256: rows.Artifact.of(row.task_json.encode()) for row in new}
        )
        return await self._writer.write(lambda c: leases.submit(c, self._now, new, records))

    async def claim(
        self,
        *,
        limit: int,
        run_id: str | None = None,
        ids: Sequence[str] | None = None,
        ttl_s: float = DEFAULT_TTL_S,
    ) -> list[rows.Lease]:
        """Take up to `limit` rollouts that are due and that nobody holds."""
        return await self._writer.write(
            lambda c: leases.claim(
                c, self._now, self.worker, ttl_ms=round(ttl_s * 1000), limit=limit, run_id=run_id, ids=ids
            )
        )

    async def heartbeat(self, held: Sequence[rows.Lease], *, ttl_s: float = DEFAULT_TTL_S) -> dict[str, bool]:
        """Renew leases; return id -> "cancel requested" for those still ours."""
        pairs = [(lease.rollout_id, lease.fence) for lease in held]
        return await self._writer.write(
            lambda c: leases.heartbeat(c, self._now, self.worker.worker_id, pairs, ttl_ms=round(ttl_s * 1000))
        )

    async def transition(
        self,
        lease: rows.Lease,
        trigger: str,
        *,
        op_id: str,
        payload: dict[str, Any] | None = None,
        extra: Sequence[rows.Row] = (),
        cancellable: bool = False,
        give_back: rows.GiveBack | None = None,
        failure: tuple[str, str] | None = None,
    ) -> rows.Outcome:
        """Make one move of the state machine together with its evidence, in one transaction.

        `failure` is (failure class, message) for the trigger `fail`. Raises `errors.IllegalTransition`.
        """
        move = primitive.Move(
            lease=lease,
            trigger=trigger,
            payload=payload or {},
            extra=extra,
            op_id=op_id,
            actor=self.worker.worker_id,
            cancellable=cancellable,
            give_back=give_back,
            failure_class=failure[0] if failure else None,
            failure_msg=failure[1] if failure else None,
        )
        return await self._writer.write(lambda c: primitive.transition(c, self._now, move))

    async def record(
        self,
        lease: rows.Lease,
        extra: Sequence[rows.Row] = (),
        *,
        spend: str | None = None,
        give_back: rows.GiveBack | None = None,
    ) -> rows.Outcome:
        """Store evidence under the lease without a move; may spend a budget or end the attempt."""
        return await self._writer.write(
            lambda c: primitive.record(c, self._now, lease, extra, spend=spend, give_back=give_back)
        )

    async def next_sandbox_ordinal(self, lease: rows.Lease) -> int:
        """Return the number that the next sandbox of this lease gets in its key."""
        return await self._writer.write(lambda c: ledger.next_ordinal(c, lease.rollout_id, lease.fence))

    async def close_sandbox(self, key: str, proof: str) -> bool:
        """Mark a sandbox released with the provider's proof; False when it was closed before."""
        return await self._writer.write(lambda c: ledger.close(c, self._now, key, proof))

    async def note_failed_release(self, key: str, error: str) -> None:
        """Count a release that could not be proven; the ledger row stays open."""
        await self._writer.write(lambda c: ledger.note_failed_release(c, key, error))

    async def record_validation(self, row: rows.ValidationRow) -> None:
        """Store one control run of a task."""
        record = await asyncio.to_thread(rows.Artifact.of, row.task_json.encode())
        await self._writer.write(lambda c: leases.record_validation(c, self._now, row, record))
