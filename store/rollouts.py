"""The store as the rest of the program uses it: durable writes by one thread, reads that never block them."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

from store import engine, errors, leases, ledger, orphans, rows
from store.changes import Change
from store.dialect import Dialect
from store.history import History
from store.look import Look
from store.writer import Writer

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    import sqlalchemy as sa

    from store.workers import WorkerIdentity

DEFAULT_TTL_S = 60.0
DEFAULT_OUTAGE_S = 900.0


class Store(Look):
    """One open database. `open` it, `close` it; every write is durable when its await returns.

    Usable from several event loops and threads of one process. While the database cannot be reached, writes and reads
    wait up to the outage limit; then they raise `errors.StoreUnreachable`, and a write's outcome has to be re-read.
    """

    def __init__(
        self,
        url: sa.URL,
        *,
        worker: WorkerIdentity,
        uuid: str,
        dialect: Dialect,
        fsm_version: int,
        ttl_s: float,
        outage_s: float,
    ) -> None:
        super().__init__(url, worker=worker, uuid=uuid, history=History(url, outage_s=outage_s))
        self.dialect = dialect
        self._fsm_version = fsm_version
        self.ttl_s = ttl_s
        """How long a lease lasts without renewal."""
        self._writer = Writer(
            engine.write_engine(url, busy_ms=engine.WRITER_BUSY_MS),
            dialect,
            worker.worker_id,
            ticket=engine.ticket(url),
            outage_s=min(outage_s, engine.OPEN_PATIENCE_S),  # while it opens; see `open`
        )

    @classmethod
    async def open(
        cls,
        url: str,
        *,
        worker: WorkerIdentity,
        edges: Iterable[tuple[str, str, str]],
        new_uuid: str,
        fsm_version: int = 1,
        now_sql: str | None = None,
        ttl_s: float = DEFAULT_TTL_S,
        outage_s: float = DEFAULT_OUTAGE_S,
    ) -> Self:
        """Open or create the database at `url` and register this worker.

        `edges` are the state machine's (source, trigger, destination) and `fsm_version` its number: rollouts of a later
        one, which newer programs submitted meanwhile, are left to them; `new_uuid` names a store made by this call;
        `now_sql` replaces the SQL that gives epoch milliseconds; `outage_s` is how long to wait for a database that is
        away. Raises `errors.StoreUnusable` or `StoreUnreachable`.
        """
        parsed = engine.parse_url(url)
        given_up = threading.Event()
        try:
            uuid = await asyncio.to_thread(
                engine.prepare, parsed, set(edges), store_uuid=new_uuid, given_up=given_up.is_set
            )
        finally:
            given_up.set()  # a cancelled open must not leave a thread behind that waits for its turn
        dialect = Dialect.of(parsed, now_sql)
        store = cls(
            parsed,
            worker=worker,
            uuid=uuid,
            dialect=dialect,
            fsm_version=fsm_version,
            ttl_s=ttl_s,
            outage_s=outage_s,
        )
        try:
            await store._writer.write("register", lambda c: leases.register(c, dialect, worker))
            store._writer.outage_s = outage_s
        except BaseException:
            await store._writer.close()
            raise
        return store

    async def close(self) -> None:
        """Commit what is queued, say that this worker stops, and let go of every connection.

        Raises `errors.StoreUnreachable`, within seconds, when the database is away. Harmless when repeated.
        """
        stop = asyncio.ensure_future(
            self._writer.write("stop", lambda c: leases.stop(c, self.dialect, self.worker.worker_id))
        )
        try:
            await asyncio.sleep(0)  # into the queue, before it closes
            await self._writer.close()
            with suppress(errors.StoreClosed):
                await stop
        finally:
            stop.cancel()
            await super().close()

    async def submit(self, new: Sequence[rows.NewRollout]) -> list[tuple[str, bool]]:
        """Insert the rollouts that are new, all or none; return (id, is new) for each, in order.

        Raises `errors.Conflict` when a key exists with another request.
        """
        records = await asyncio.to_thread(
            lambda: {row.task_sha256: rows.Artifact.of(row.task_json.encode()) for row in new}
        )
        return await self._writer.write("submit", lambda c: leases.submit(c, self.dialect, new, records))

    async def claim(
        self,
        *,
        limit: int,
        run_id: str | None = None,
        ids: Sequence[str] | None = None,
        ttl_s: float | None = None,
        early: bool = False,
    ) -> list[rows.Lease]:
        """Take up to `limit` rollouts that are due and that nobody holds; with `early`, also before they are due."""
        ttl_ms = round((self.ttl_s if ttl_s is None else ttl_s) * 1000)
        return await self._writer.write(
            "claim",
            lambda c: leases.claim(
                c,
                self.dialect,
                self.worker,
                fsm_version=self._fsm_version,
                ttl_ms=ttl_ms,
                limit=limit,
                run_id=run_id,
                ids=ids,
                early=early,
            ),
        )

    async def reacquire(self, lease: rows.Lease) -> bool:
        """Take back a lease that ran out; False when somebody claimed the rollout meanwhile."""
        pair = (lease.rollout_id, lease.fence)
        ttl_ms = round(self.ttl_s * 1000)
        kept = await self._writer.write(
            "reacquire",
            lambda c: leases.reacquire(c, self.dialect, self.worker.worker_id, [pair], ttl_ms=ttl_ms),
        )
        return lease.rollout_id in kept

    async def request_cancel(self, rollout_id: str) -> bool:
        """Ask the owner of a rollout to stop it (it hears with its next heartbeat); False when it is too late."""
        return await self._writer.write(
            "request_cancel", lambda c: leases.request_cancel(c, self.dialect, rollout_id)
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

        `failure` is (failure class, message) for the trigger `fail`. Raises `errors.IllegalTransition` or `Conflict`.
        """
        return await self._writer.change(
            Change(
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
        )

    async def record(
        self,
        lease: rows.Lease,
        extra: Sequence[rows.Row] = (),
        *,
        spend: str | None = None,
        give_back: rows.GiveBack | None = None,
    ) -> rows.Outcome:
        """Store evidence under the lease without a move; may spend a budget or end the attempt."""
        return await self._writer.change(Change(lease=lease, extra=extra, spend=spend, give_back=give_back))

    async def deliver(self, given: rows.Delivery) -> None:
        """Write down what a caller is handed, before it is."""
        await self._writer.write("deliver", lambda c: leases.deliver(c, self.dialect, given))

    async def next_sandbox_ordinal(self, lease: rows.Lease) -> int:
        """Return the number that the next sandbox of this lease gets in its key."""
        return await self._writer.write(
            "next_sandbox_ordinal", lambda c: ledger.next_ordinal(c, lease.rollout_id, lease.fence)
        )

    async def close_sandbox(self, key: str, proof: str, *, lost: bool = False) -> bool:
        """Mark a sandbox released with the provider's proof, or lost; False when it was closed before."""
        status = "lost" if lost else "released"
        return await self._writer.write(
            "close_sandbox", lambda c: ledger.close(c, self.dialect, key, proof, status)
        )

    async def note_failed_release(self, key: str, error: str, found: Sequence[str] = ()) -> None:
        """Count a release that could not be proven; the ledger row stays open. `found`: ids of what was there."""
        await self._writer.write(
            "note_failed_release", lambda c: ledger.note_failed_release(c, key, error, found)
        )

    async def declare_sandbox(self, intent: rows.SandboxIntent) -> None:
        """Write down a sandbox that belongs to no rollout, before it is made; `give_up_abandoned` finds it later."""
        await self._writer.write("declare_sandbox", lambda c: ledger.declare(c, self.dialect, intent))

    async def note_live_sandbox(self, live: rows.SandboxLive) -> None:
        """Write down that a declared sandbox was made."""
        await self._writer.write("note_live_sandbox", lambda c: ledger.note_live(c, self.dialect, live))

    async def give_up_sandbox(self, key: str) -> None:
        """Mark a declared sandbox as to be released; harmless when repeated or when it was never declared."""
        await self._writer.write("give_up_sandbox", lambda c: ledger.give_up(c, self.dialect, key))

    async def give_up_abandoned(self, owner_of: Callable[[str], str | None]) -> list[tuple[str, str]]:
        """Mark the sandboxes of no rollout whose worker is gone as to be released; return (key, authority) of each.

        `owner_of` tells the worker id in a key; a worker that may still live keeps its own.
        """
        return await self._writer.write(
            "give_up_abandoned",
            lambda c: orphans.give_up_abandoned(c, self.dialect, self.worker, owner_of),
        )

    async def give_up_ownerless(self, ids: Collection[str] | None = None) -> list[str]:
        """Mark the sandboxes of rollouts that are over or that nobody holds as to be released; return their keys."""
        return await self._writer.write(
            "give_up_ownerless", lambda c: orphans.give_up_ownerless(c, self.dialect, ids)
        )

    async def take_from_dead(self, ids: Collection[str] | None = None) -> list[str]:
        """End the leases of provably dead workers of this machine; return the rollouts, free to be claimed."""
        return await self._writer.write(
            "take_from_dead", lambda c: orphans.take_from_dead(c, self.dialect, self.worker, ids)
        )

    async def write_off(self, ref: str, why: str) -> list[str]:
        """Mark the sandboxes of an authority that will never answer as lost, past their expiry; return their keys."""
        return await self._writer.write("write_off", lambda c: orphans.write_off(c, self.dialect, ref, why))

    async def record_validation(self, row: rows.ValidationRow) -> None:
        """Store one control run of a task."""
        record = await asyncio.to_thread(rows.Artifact.of, row.task_json.encode())
        await self._writer.write(
            "record_validation", lambda c: leases.record_validation(c, self.dialect, row, record)
        )
