"""PostgreSQL the usual way: a BEGIN, UPDATE, INSERT, COMMIT of its own per transition, on a connection per task.

`python -m bench.store_rounds.own_transactions URL [prepared]` serves rounds like the other contenders; with `prepared` the
driver has the server keep the plans, as it does by itself where no transaction-mode pooler forbids it.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any, LiteralString

import psycopg
from psycopg import sql

from bench.store_rounds import workload
from bench.store_rounds.workload import Walked

CONNECTIONS = 64
_NOW: LiteralString = "CAST(extract(epoch FROM clock_timestamp()) * 1000 AS bigint)"
_CAS: LiteralString = (
    f"UPDATE rollouts SET state = %(dst)s, version = version + 1, updated_at = {_NOW}"
    " WHERE id = %(id)s AND version = %(version)s AND fence = %(fence)s AND state = %(src)s"
    f" AND lease_until > {_NOW}"
)
_LOG: LiteralString = (
    "INSERT INTO transitions (rollout_id, seq, src, trig, dst, fence, actor, op_id, at, payload) VALUES"
    " (%(id)s, %(version)s + 1, %(src)s, %(trig)s, %(dst)s, %(fence)s, %(actor)s, %(op_id)s,"
    f" {_NOW}, CAST(%(payload)s AS jsonb))"
)


async def _move(connection: psycopg.AsyncConnection[Any], walked: Walked) -> None:
    src, trig, dst = walked.move
    parameters = {
        "id": walked.rollout_id, "version": walked.version, "fence": walked.fence, "src": src, "trig": trig,
        "dst": dst, "actor": "0" * 32, "op_id": f"{walked.version:032x}", "payload": workload.PAYLOAD_JSON,
    }  # fmt: skip
    async with connection.transaction():
        changed = await connection.execute(sql.SQL(_CAS), parameters)
        if changed.rowcount != 1:
            raise RuntimeError("a transition was not applied")
        await connection.execute(sql.SQL(_LOG), parameters)
    walked.version += 1


async def _walk(connection: psycopg.AsyncConnection[Any], mine: list[Walked], deadline: float) -> int:
    done = 0
    while time.perf_counter() < deadline:
        await _move(connection, mine[done % len(mine)])
        done += 1
    return done


async def _ready(
    url: str, prepare_threshold: int | None
) -> tuple[list[Walked], list[psycopg.AsyncConnection[Any]]]:
    store = await workload.open_store(url)
    leases = await workload.claimed(store)
    await store.close()
    connections = [
        await psycopg.AsyncConnection.connect(url, autocommit=True, prepare_threshold=prepare_threshold)
        for _ in range(CONNECTIONS)
    ]
    return [Walked(lease.rollout_id, lease.fence) for lease in leases], connections


async def main(url: str, prepare_threshold: int | None) -> None:
    """Serve rounds."""
    walked, connections = await _ready(url, prepare_threshold)

    async def round_of(seconds: float, tasks: int) -> dict[str, Any]:
        deadline = time.perf_counter() + seconds
        mine = [(connections[n], walked[n::tasks]) for n in range(tasks)]
        return {"count": sum(await asyncio.gather(*(_walk(one, own, deadline) for one, own in mine)))}

    await workload.serve(round_of)
    for connection in connections:
        await connection.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], 5 if sys.argv[2:] == ["prepared"] else None))
