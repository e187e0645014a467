"""One writer thread per process: everything queued shares a transaction, and nobody is answered before its commit."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import sqlalchemy as sa

from store import errors

T = TypeVar("T")
Operation = Callable[[sa.Connection], T]
"""Runs inside the shared transaction; refuses by returning a value, and only breaks by raising."""

_BATCH = 512


@dataclass(frozen=True, slots=True)
class _Item:
    operation: Operation[Any]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]

    def answer(self, result: object, error: BaseException | None) -> None:
        def settle() -> None:
            if self.future.done():
                return
            if error is None:
                self.future.set_result(result)
            else:
                self.future.set_exception(error)

        try:
            self.loop.call_soon_threadsafe(settle)
        except RuntimeError:
            return  # the caller's loop is closed: nobody waits for the answer any more


class Writer:
    """Group commit over one synchronous engine.

    A cancelled caller does not withdraw its write: the outcome is unknown to it and has to be re-read.
    """

    def __init__(
        self, engine: sa.Engine, ticket: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        self._engine = engine
        self._ticket = ticket
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="store-writer", daemon=True)
        self._thread.start()

    async def write(self, operation: Operation[T]) -> T:
        """Run `operation` in the next batch and return its result once the commit is durable.

        Raises what the operation raised (its own statements are rolled back), `StoreUnreachable` when the database
        failed, or `StoreClosed`.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        with self._lock:
            if self._closed:
                raise errors.StoreClosed("the store is closed")
            self._queue.put(_Item(operation, loop, future))
        return await future

    async def close(self) -> None:
        """Commit what is queued, then end the thread."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        stopping = False
        while not stopping:
            batch = [self._queue.get()]
            while len(batch) < _BATCH and not self._queue.empty():
                batch.append(self._queue.get())
            items = [item for item in batch if item is not None]
            stopping = len(items) < len(batch)
            if items:
                self._commit(items)
        self._engine.dispose()

    def _commit(self, items: list[_Item]) -> None:
        try:
            results = self._transact(items)
        except Exception as e:  # noqa: BLE001 - the thread's boundary: every error goes to the caller who wrote it
            if len(items) == 1:
                items[0].answer(None, _translated(e))
                return
            for item in items:
                self._commit([item])
            return
        for item, result in zip(items, results, strict=True):
            item.answer(result, None)

    def _transact(self, items: list[_Item]) -> list[object]:
        with self._ticket(), self._engine.begin() as connection:
            return [item.operation(connection) for item in items]


def _translated(error: Exception) -> Exception:
    if isinstance(error, sa.exc.OperationalError):
        unreachable = errors.StoreUnreachable(
            f"the database did not take the write: {error.orig}",
            hint="check the disk, then run the command again",
        )
        unreachable.__cause__ = error
        return unreachable
    return error
