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
    from collections.abc import Callable

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


def ours(url: str) -> None:
    """Serve rounds through the store's public interface."""
    with asyncio.Runner() as runner:
        store = runner.run(workload.open_store(url))
        walkers = workload.Walkers(store, runner.run(workload.claimed(store)))

        def round_of(seconds: float, tasks: int) -> dict[str, Any]:
            before = runner.run(_batches(store))
            count = runner.run(walkers.round(seconds, tasks))
            return {"count": count, "batches": runner.run(_batches(store)) - before}

        workload.serve(round_of)
        runner.run(store.close())


async def _batches(store: workload.Store) -> int:
    found = await store.history.sql("SELECT max(last_batch) FROM workers", limit=1, timeout_s=10)
    return int(found.rows[0][0])


def raw(url: str) -> None:
    """Serve rounds of the `sqlite3` module: one commit per transition, WAL and FULL."""
    walked = asyncio.run(_prepared(url))
    connection = sqlite3.connect(str(sa.make_url(url).database), isolation_level=None)
    for pragma in ("journal_mode = wal", "synchronous = 2", "foreign_keys = 1"):
        connection.execute(f"PRAGMA {pragma}").fetchall()

    def round_of(seconds: float, _tasks: int) -> dict[str, Any]:
        deadline = time.perf_counter() + seconds
        done = 0
        while time.perf_counter() < deadline:
            rollout = walked[done % len(walked)]
            parameters = _parameters(rollout)
            connection.execute("BEGIN IMMEDIATE")
            changed = connection.execute(_CAS, parameters).rowcount
            if changed != 1:
                raise RuntimeError("a transition was not applied")
            connection.execute(_LOG, parameters)
            connection.execute("COMMIT")
            rollout.version += 1
            done += 1
        return {"count": done}

    workload.serve(round_of)
    connection.close()


def _naive_engine(url: str) -> AsyncEngine:
    engine = create_async_engine(sa.make_url(url).set(drivername="sqlite+aiosqlite"), connect_args={"timeout": 60})

    @event.listens_for(engine.sync_engine, "connect")
    def _connect(connection: Any, _record: object) -> None:  # noqa: ANN401 - the DBAPI's own type
        cursor = connection.cursor()
        for pragma in ("journal_mode = wal", "synchronous = 2", "foreign_keys = 1"):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    return engine


def naive(url: str) -> None:
    """Serve rounds of async SQLAlchemy over aiosqlite as one would write it: a transaction of its own per transition."""
    walked = asyncio.run(_prepared(url))
    cas, log = sa.text(_CAS), sa.text(_LOG)
    with asyncio.Runner() as runner:
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

        async def everyone(seconds: float, tasks: int) -> int:
            deadline = time.perf_counter() + seconds
            return sum(await asyncio.gather(*(walk(walked[n::tasks], deadline) for n in range(tasks))))

        workload.serve(lambda seconds, tasks: {"count": runner.run(everyone(seconds, tasks))})
        runner.run(engine.dispose())


CONTENDERS: dict[str, Callable[[str], None]] = {"ours": ours, "raw": raw, "naive": naive}

if __name__ == "__main__":
    CONTENDERS[sys.argv[1]](sys.argv[2])
