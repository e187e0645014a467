"""One writer thread per process: everything queued shares a transaction, and nobody is answered before its commit."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeVar, cast

import sqlalchemy as sa

from store import changes, errors, failpoints
from store.changes import Change
from store.dialect import is_trouble
from store.schema import workers

if TYPE_CHECKING:
    from store import rows
    from store.dialect import Dialect
    from store.engine import Ticket

logger = logging.getLogger(__name__)

T = TypeVar("T")
Operation = Callable[[sa.Connection], T]
"""Runs inside the shared transaction; refuses by returning a value, and only breaks by raising."""

BATCH = 512
CAPACITY = 8192
"""Writes that may wait; beyond it callers wait for room."""
_WRITES = frozenset(failpoints.WRITES)
_RETRY_S = (0.05, 0.1, 0.2, 0.5, 1.0)
_CLOSING_PATIENCE_S = 1.5
_SAY_EVERY_S = 30.0


@dataclass(slots=True)
class _Item:
    name: str
    work: Change | Operation[Any]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]

    def answer(self, result: object) -> None:
        """Tell the caller; runs on its loop. An exception as `result` is raised there."""
        if self.future.done():
            return
        if isinstance(result, BaseException):
            self.future.set_exception(result)
        else:
            self.future.set_result(result)


def _answer_all(items: list[_Item], results: list[object]) -> None:
    """Tell every caller, waking each loop once: a wake-up per caller would cost more than its write."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Item, object]]] = {}
    for item, result in zip(items, results, strict=True):
        by_loop.setdefault(item.loop, []).append((item, result))

    def settle(answers: list[tuple[_Item, object]]) -> None:
        for item, result in answers:
            item.answer(result)

    for loop, answers in by_loop.items():
        _on(loop, partial(settle, answers))


def _on(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> bool:
    """Run the callback on its loop; False when that loop is closed, so that nobody waits there any more."""
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        return False
    return True


def _free(place: asyncio.Future[None]) -> None:
    if not place.done():
        place.set_result(None)


class Writer:
    """Group commit over one connection. May be used from many event loops and threads at once.

    A cancelled caller does not withdraw its write: the outcome is unknown to it and has to be re-read. While the
    database cannot be reached, writes wait up to `outage_s`; whether a commit whose answer was lost took place is read
    from a mark that is part of every batch.
    """

    def __init__(
        self,
        engine: sa.Engine,
        dialect: Dialect,
        worker_id: str,
        *,
        ticket: Ticket,
        outage_s: float = 900.0,
    ) -> None:
        self._engine = engine
        self._dialect = dialect
        self._worker_id = worker_id
        self._ticket = ticket
        self.outage_s = outage_s
        """How long writes wait for a database that is away."""
        self._queue: deque[_Item] = deque()
        self._waiting: deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = deque()
        self._changed = threading.Condition(threading.Lock())
        self._closed = False
        self._in_flight: list[list[_Item]] = []
        """Groups that each share a transaction, the one being committed first; a new thread goes on here."""
        self._batch_no = 0
        self._mark_sql = dialect.driver_sql(_MARK)
        self._settled = 0
        self._computed: tuple[list[_Item], list[object]] | None = None
        """The last batch that reached its COMMIT, with its results: durable or not is read from the mark."""
        self._closing = threading.Event()
        self._closed_s = 0.0
        self._connection: sa.Connection | None = None
        """Kept from batch to batch, and let go after any error."""
        self._given_up: errors.StoreUnreachable | None = None
        """Why a closing writer stopped trying: what is still queued gets the same answer at once."""
        self._thread = self._start()

    async def write(self, name: str, operation: Operation[T]) -> T:
        """Run `operation` in the next batch and return its result once the commit is durable.

        `name` is one of `failpoints.WRITES`. Raises what the operation raised (all its statements are rolled back),
        `StoreUnreachable` after `outage_s`, or `StoreClosed`.
        """
        result: T = await self._enqueue(name, operation)
        return result

    async def change(self, change: Change) -> rows.Outcome:
        """Make a guarded change in the next batch; raises like `write`."""
        name = "record" if change.trigger is None else f"transition.{change.trigger}"
        result: rows.Outcome = await self._enqueue(name, change)
        return result

    async def close(self) -> None:
        """Commit what is queued, then end the thread.

        Raises `StoreUnreachable` when the database does not answer; the process may end although the thread waits.
        """
        with self._changed:
            if not self._closed:
                self._closed, self._closed_s = True, time.monotonic()
            self._closing.set()
            self._changed.notify_all()
            self._make_room(len(self._waiting))
        await asyncio.to_thread(self._join)
        if self._thread.is_alive() or self._queue or self._in_flight:
            left = len(self._queue) + sum(len(items) for items in self._in_flight)
            raise errors.StoreUnreachable(
                f"closed while the outcome of {left} writes is unknown", hint="mend the database, then resume"
            )

    def _join(self) -> None:
        """Wait for the thread while it gets on; one that stands still for the closing patience is left behind."""
        seen = -1
        while self._thread.is_alive() and seen != self._settled:
            seen = self._settled
            self._thread.join(_CLOSING_PATIENCE_S + 1)

    async def _enqueue(self, name: str, work: Change | Operation[Any]) -> Any:  # noqa: ANN401 - what the work returns
        if name not in _WRITES:
            raise KeyError(f"write {name!r} has no failpoint")
        loop = asyncio.get_running_loop()
        item = _Item(name, work, loop, loop.create_future())
        while not self._offer(item):
            await self._room(loop)
        return await item.future

    def _offer(self, item: _Item) -> bool:
        with self._changed:
            if self._closed:
                raise errors.StoreClosed("the store is closed")
            if len(self._queue) >= CAPACITY:
                return False
            self._queue.append(item)
            if not self._thread.is_alive():
                self._thread = self._start()
            if len(self._queue) == 1:  # else the thread was told, and has not come yet
                self._changed.notify()
            return True

    async def _room(self, loop: asyncio.AbstractEventLoop) -> None:
        free: asyncio.Future[None] = loop.create_future()
        with self._changed:
            if len(self._queue) < CAPACITY:
                return
            self._waiting.append((loop, free))
        await free

    def _start(self) -> threading.Thread:
        thread = threading.Thread(target=self._run, name="store-writer", daemon=True)
        thread.start()
        return thread

    def _run(self) -> None:
        try:
            self._settle()
            while items := self._take():
                self._in_flight.append(items)
                self._settle()
        except BaseException:
            logger.critical("the writer thread died; a new one settles what it left", exc_info=True)
            self._disconnect()
            time.sleep(_RETRY_S[0])
            with self._changed:
                self._thread = self._start()
            return
        self._disconnect()
        self._engine.dispose()
        self._ticket.close()

    def _take(self) -> list[_Item]:
        """Return what is queued, at most a batch; nothing when closed and drained."""
        with self._changed:
            while not self._queue and not self._closed:
                self._changed.wait()
            items = [self._queue.popleft() for _ in range(min(BATCH, len(self._queue)))]
            self._make_room(len(items))
            return items

    def _make_room(self, places: int) -> None:
        """Let so many callers try again; one who gave up or whose loop is closed takes nobody's place."""
        while places > 0 and self._waiting:
            loop, free = self._waiting.popleft()
            if not free.done() and _on(loop, partial(_free, free)):
                places -= 1

    def _settle(self) -> None:
        """Commit what is in flight and answer every item of it, whatever happens."""
        while self._in_flight:
            items = self._in_flight[0]
            try:
                results = self._commit_patiently(items)
            except Exception as e:  # noqa: BLE001 - the thread's boundary: every error goes to the caller who wrote it
                if len(items) > 1 and not isinstance(e, errors.StoreUnreachable):
                    self._in_flight[:1] = [[item] for item in items]
                    continue
                results = [e] * len(items)
            failpoints.hit_each((item.name for item in items), "after_commit")
            _answer_all(items, results)
            del self._in_flight[0]
            self._settled += 1

    def _commit_patiently(self, items: list[_Item]) -> list[object]:
        """Commit once, waiting out trouble with the database; raises `StoreUnreachable` when it lasts too long."""
        if self._given_up is not None:
            raise self._given_up
        started = said = time.monotonic()
        tries = 0

        def too_long() -> bool:
            closing = self._closed and time.monotonic() - self._closed_s >= _CLOSING_PATIENCE_S
            return closing or time.monotonic() - started >= self.outage_s

        while True:
            try:
                return self._durable_results(items) or self._transact(items, too_long)
            except errors.StoreUnreachable as e:
                self._given_up = e if self._closed else None
                raise
            except sa.exc.DBAPIError as e:
                if not is_trouble(e):
                    raise
                if too_long():
                    waited = time.monotonic() - started
                    away = errors.StoreUnreachable(
                        f"the database did not take {len(items)} writes for {waited:.0f} s: {e.orig}",
                        hint="mend the database or its disk; nothing that was acknowledged is lost",
                    )
                    self._given_up = away if self._closed else None
                    raise away from e
                if tries == 0 or time.monotonic() - said >= _SAY_EVERY_S:
                    said = time.monotonic()
                    logger.warning("the database does not take writes (%s); trying again", e.orig)
            pause = _RETRY_S[min(tries, len(_RETRY_S) - 1)]
            if self._closing.wait(pause):
                time.sleep(_RETRY_S[0])
            tries += 1

    def _durable_results(self, items: list[_Item]) -> list[object] | None:
        """Return what an earlier try found whose COMMIT was not answered but took place."""
        if self._computed is None or self._computed[0] is not items or self._mark() != self._batch_no:
            return None
        return self._computed[1]

    def _transact(self, items: list[_Item], too_long: Callable[[], bool]) -> list[object]:
        self._computed = None
        self._batch_no += 1
        with self._ticket(too_long), self._transaction() as connection:
            results = self._execute(connection, items)
            self._dialect.run(connection, self._mark_sql, {"of": self._worker_id, "number": self._batch_no})
            failpoints.hit_each((item.name for item in items), "before_commit")
            self._computed = (items, results)
        return results

    def _execute(self, connection: sa.Connection, items: list[_Item]) -> list[object]:
        """Do the work of every item in the order of the queue, guarded changes that stand together in one go."""
        results: list[object] = []
        for guarded, run in groupby((item.work for item in items), lambda work: isinstance(work, Change)):
            if guarded:
                results += changes.apply(connection, self._dialect, cast("list[Change]", list(run)))
            else:
                results += [operation(connection) for operation in cast("list[Operation[Any]]", list(run))]
        return results

    @contextmanager
    def _transaction(self) -> Iterator[sa.Connection]:
        """Open a transaction on the kept connection; whatever goes wrong in it costs the connection."""
        if self._connection is None:
            self._connection = self._engine.connect()
        try:
            with self._dialect.transaction(self._connection):
                yield self._connection
        except BaseException:
            self._disconnect()
            raise

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _mark(self) -> int:
        """Return the number of this worker's last batch that is durable.

        Locks the row, so that a server that still works on the lost commit finishes it before it answers.
        """
        with self._transaction() as connection:
            found = connection.execute(
                sa.select(workers.c.last_batch)
                .where(workers.c.worker_id == self._worker_id)
                .with_for_update()
            ).scalar()
            return 0 if found is None else int(found)


_MARK = "UPDATE workers SET last_batch = :number WHERE worker_id = :of"
