"""The programs that are compared, each a process of its own: `python -m bench.store_rounds.contenders NAME URL`."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
import time
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from bench.store_rounds import workload
from bench.store_rounds.workload import Walked
from store.dialect import SQLITE_NOW

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from store.rollouts import Store

_PRAGMAS = ("journal_mode = wal", "synchronous = 2", "foreign_keys = 1")
_CAS = f"""UPDATE rollouts SET state = :dst, version = version + 1, updated_at = {SQLITE_NOW}
  WHERE id = :id AND version = :version AND fence = :fence AND state = :src AND lease_until > {SQLITE_NOW}"""
_LOG = f"""INSERT INTO transitions (rollout_id, seq, src, trig, dst, fence, actor, op_id, at, payload)
  VALUES (:id, :version + 1, :src, :trig, :dst, :fence, :actor, :op_id, {SQLITE_NOW}, :payload)"""


def _parameters(walked: Walked) -> dict[str, Any]:
    src, trig, dst = walked.move
    return {
        "id": walked.rollout_id, "version": walked.version, "fence": walked.fence, "src": src, "trig": trig,
        "dst": dst, "actor": "0" * 32, "op_id": f"{walked.version:032x}", "payload": workload.PAYLOAD_JSON,
    }  # fmt: skip


async def _prepared(url: str) -> list[Walked]:
    """Make the database with our migrations and claim its rollouts."""
    store = await workload.open_store(url)
    leases = await workload.claimed(store)
    await store.close()
    return [Walked(lease.rollout_id, lease.fence) for lease in leases]


async def ours(url: str) -> None:
    """Serve rounds through the store's public interface."""
    store = await workload.open_store(url)
    walkers = workload.Walkers(store, await workload.claimed(store))

    async def round_of(seconds: float, tasks: int) -> dict[str, Any]:
        before = await _batches(store)
        started = time.perf_counter()
        count = await walkers.round(seconds, tasks)
        took = time.perf_counter() - started
        batches = await _batches(store) - before
        return {"count": count, "seconds": took, "batches": batches, "refused": len(walkers.refused)}

    await workload.serve(round_of)
    await store.close()


async def _batches(store: Store) -> int:
    found = await store.history.sql("SELECT max(last_batch) FROM workers", limit=1, timeout_s=10)
    return int(found.rows[0][0])


async def raw(url: str) -> None:
    """Serve rounds of the `sqlite3` module: one commit per transition, WAL and FULL; nothing asynchronous in a round."""
    walked = await _prepared(url)
    connection = sqlite3.connect(str(sa.make_url(url).database), isolation_level=None)
    for pragma in _PRAGMAS:
        connection.execute(f"PRAGMA {pragma}").fetchall()

    async def round_of(seconds: float, _tasks: int) -> dict[str, Any]:
        deadline = time.perf_counter() + seconds
        done = 0
        while time.perf_counter() < deadline:
            rollout = walked[done % len(walked)]
            parameters = _parameters(rollout)
            connection.execute("BEGIN IMMEDIATE")
            if connection.execute(_CAS, parameters).rowcount != 1:
                raise RuntimeError("a transition was not applied")
            connection.execute(_LOG, parameters)
            connection.execute("COMMIT")
            rollout.version += 1
            done += 1
        return {"count": done}

    await workload.serve(round_of)
    connection.close()


def _naive_engine(url: str) -> AsyncEngine:
    engine = create_async_engine(
        sa.make_url(url).set(drivername="sqlite+aiosqlite"), connect_args={"timeout": 60}
    )

    @event.listens_for(engine.sync_engine, "connect")
    def _connect(connection: Any, _record: object) -> None:  # noqa: ANN401 - the DBAPI's own type
        cursor = connection.cursor()
        for pragma in _PRAGMAS:
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    return engine


async def naive(url: str) -> None:
    """Serve rounds of async SQLAlchemy over aiosqlite as one would write it: a transaction of its own per transition."""
    walked = await _prepared(url)
    cas, log = sa.text(_CAS), sa.text(_LOG)
    engine = _naive_engine(url)

    async def walk(mine: list[Walked], deadline: float) -> int:
        done = 0
        while time.perf_counter() < deadline:
            rollout = mine[done % len(mine)]
            parameters = _parameters(rollout)
            async with engine.begin() as connection:
                if (await connection.execute(cas, parameters)).rowcount != 1:
                    raise RuntimeError("a transition was not applied")
                await connection.execute(log, parameters)
            rollout.version += 1
            done += 1
        return done

    async def round_of(seconds: float, tasks: int) -> dict[str, Any]:
        deadline = time.perf_counter() + seconds
        counts = await asyncio.gather(*(walk(walked[n::tasks], deadline) for n in range(tasks)))
        return {"count": sum(counts)}

    await workload.serve(round_of)
    await engine.dispose()


CONTENDERS: dict[str, Callable[[str], Coroutine[Any, Any, None]]] = {"ours": ours, "raw": raw, "naive": naive}

if __name__ == "__main__":
    asyncio.run(CONTENDERS[sys.argv[1]](sys.argv[2]))
