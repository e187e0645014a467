"""What must be true of every engine at once: the same outcomes and rows, few connections, no session state."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator import states
from store import rows, schema, workers
from store.heartbeat import Heartbeat
from store.history import History
from store.rollouts import Store

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestrator.testing.postgres import PostgresServer
    from tests.conftest import Database, OpenStore

    New = Callable[..., rows.NewRollout]

EDGES = {(src.value, trigger, dst.value) for (src, trigger), dst in states.EDGES.items()}
CLOCK = "(SELECT CAST(value AS BIGINT) FROM schema_meta WHERE key = 'clock')"
"""A clock that a test sets."""


@pytest.mark.postgres
async def test_both_engines_give_the_same_outcomes_and_the_same_rows(
    make_database: Callable[[str], Database], new_rollout: New
):
    new = [new_rollout() for _ in range(6)]
    told = [await played(make_database(kind), new) for kind in ("sqlite", "postgresql")]
    assert told[0][0] == told[1][0]
    for table in schema.metadata.tables:
        assert told[0][1][table] == told[1][1][table], table


async def played(database: Database, new: list[rows.NewRollout]) -> tuple[list[object], dict[str, list[Any]]]:
    """Play one script on a database whose clock is set; return what was answered and everything that is stored."""
    database.ask("INSERT INTO schema_meta VALUES ('clock', '1000')")
    stores = [
        await Store.open(database.url, worker=workers.this_process(name), edges=EDGES, new_uuid="u", now_sql=CLOCK)
        for name in ("one", "two")
    ]  # fmt: skip
    try:
        answers = await script(stores[0], stores[1], database, new)
    finally:
        for opened in stores:
            await opened.close()
    return answers, {table: dump(database, table) for table in schema.metadata.tables}


async def script(one: Store, two: Store, database: Database, new: list[rows.NewRollout]) -> list[object]:
    """Claims, moves, evidence, expiry, a takeover, a zombie, budgets, a cancel, a failure, a release."""
    told: list[object] = [await one.submit(new), await two.submit(new[:2])]
    mine = await one.claim(limit=3, ttl_s=60)
    theirs = await two.claim(limit=9, ttl_s=600)
    told += [mine, theirs, await one.claim(limit=1)]
    intent = rows.SandboxIntent(
        key="rw-1", role="task", provider="local", provider_ref="here", env_name=None, ttl_s=60, create_timeout_s=5
    )  # fmt: skip
    live = rows.SandboxLive(key="rw-1", provider_ids=["a", "b"], isolation="bwrap")
    told.append(await one.record(mine[0], [intent]))
    told.append(await one.transition(mine[0], "provision", op_id="1", extra=[live]))
    told.append(await one.transition(mine[0], "provision", op_id="1"))
    told.append(await one.transition(mine[0], "provision", op_id="2"))
    step = rows.StepRow(name="turn-0001", output={"ä": [1, 2.5, None]}, tool_calls=2)
    call = rows.LlmCallRow(kind="turn", outcome="ok", request_sha256="r", prompt_tokens=5)
    told.append(await one.record(mine[0], [step, call, call]))
    told.append(await one.record(mine[1], give_back=rows.GiveBack(outcome="interrupted")))
    told.append(await one.record(mine[1], [step]))
    told.append(await one.request_cancel(mine[2].rollout_id))
    told.append(await one.transition(mine[2], "provision", op_id="3", cancellable=True))
    told.append(await one.transition(mine[2], "fail", op_id="4", failure=("cancelled", "by a person")))
    database.ask("UPDATE schema_meta SET value = '61001' WHERE key = 'clock'")
    told.append(await one.transition(mine[0], "start_agent", op_id="5"))
    taken = await two.claim(limit=9, ttl_s=60)
    told += [taken, await one.transition(mine[0], "start_agent", op_id="5"), await one.reacquire(mine[0])]
    told.append(await one.record(mine[0], [step]))
    back = rows.GiveBack(outcome="failed", error_class="infra", error="no host", delay_ms=500, spend="infra")
    told.append(await two.record(theirs[0], give_back=back))
    told.append(await to_the_end(two, taken[0], "rw-1"))
    return told


async def to_the_end(store: Store, lease: rows.Lease, sandbox: str) -> list[object]:
    told: list[object] = [await store.record(lease, [rows.SandboxReleasing()])]
    told += [await store.close_sandbox(sandbox, "gone"), await store.close_sandbox(sandbox, "again")]
    for trigger in ("start_agent", "take_patch", "grade", "release"):
        moved = await store.transition(lease, trigger, op_id=f"to-{trigger}", payload={"why": trigger})
        told.append(moved)
        if isinstance(moved, rows.Applied):
            lease = rows.Lease(
                rollout_id=lease.rollout_id, fence=lease.fence, attempt_no=lease.attempt_no, version=moved.version,
                state=moved.state, previous=None,
            )  # fmt: skip
    return told


def dump(database: Database, table: str) -> list[Any]:
    """Return a table as the same values on both engines, in an order of its own."""
    columns = [c.name for c in schema.metadata.tables[table].columns]
    found = database.ask(f"SELECT {', '.join(columns)} FROM {table}")
    return sorted((tuple(plain(value) for value in row) for row in found), key=repr)


def plain(value: Any) -> Any:
    """Return JSON as one text, whether the engine gives it as text or as an object."""
    if isinstance(value, str) and value[:1] in ("{", "["):
        value = json.loads(value)
    return rows.canonical_json(value) if isinstance(value, dict | list) else value


@pytest.mark.databases("postgresql", "pooled")
async def test_a_process_holds_at_most_three_connections(
    store: Store, new_rollout: New, database: Database, postgres_server: PostgresServer
):
    name = database.url.rpartition("?")[0].rpartition("/")[2]
    seen: set[int] = set()
    async with Heartbeat(store) as heartbeat:
        await store.submit([new_rollout() for _ in range(32)])
        leases = await store.claim(limit=32)
        for lease in leases:
            heartbeat.hold(lease, lambda _why: None)
        for n in range(3):
            await asyncio.gather(
                *(store.history.rollout(lease.rollout_id) for lease in leases),
                *(store.record(lease, [rows.StepRow(name=f"{n}", output={})]) for lease in leases),
                asyncio.to_thread(heartbeat.beat),
            )
            connected = postgres_server.connections(name)
            assert {application for application, _ in connected} <= {"rollouts", ""}  # "": new in the pool
            assert len(connected) <= 3
            seen |= {pid for _, pid in connected}
    assert len(seen) >= 2, "the connections were not seen"


@pytest.mark.databases("pooled")
async def test_leases_writes_and_reads_work_behind_a_transaction_pooler(store: Store, new_rollout: New):
    await store.submit([new_rollout() for _ in range(20)])
    leases = await store.claim(limit=20)
    assert len({lease.rollout_id for lease in leases}) == 20
    step = rows.StepRow(name="one", output={})
    moved = await asyncio.gather(
        *(store.transition(lease, "provision", op_id="p", extra=[step]) for lease in leases)
    )
    assert {type(outcome) for outcome in moved} == {rows.Applied}
    again = await store.transition(leases[0], "provision", op_id="p")
    assert again == rows.AlreadyApplied(version=1, state="sandbox_ready")
    assert await store.reacquire(leases[0])
    kept = await asyncio.gather(*(store.history.of_rollout("steps", lease.rollout_id) for lease in leases))
    assert [len(found) for found in kept] == [1] * 20
    counted = await store.history.sql("SELECT count(*) FROM transitions", limit=1, timeout_s=5)
    assert counted.rows == [(20,)]


@pytest.mark.databases("pooled")
async def test_many_workers_may_open_a_new_store_behind_a_pooler(open_store: OpenStore):
    stores = await asyncio.gather(*(open_store() for _ in range(6)))
    try:
        assert len({opened.uuid for opened in stores}) == 1
    finally:
        for opened in stores:
            await opened.close()


@pytest.mark.databases("sqlite")
def test_the_readers_of_a_closed_loop_end_with_the_next_close(database: Database):
    history = History.of(database.url)

    async def look() -> None:
        await asyncio.gather(*(history.unfinished() for _ in range(4)))

    def threads() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if "connection_worker" in thread.name}

    before = threads()
    for _ in range(3):
        asyncio.run(look())
    left = threads() - before
    assert left
    asyncio.run(history.close())
    for thread in left:
        thread.join(10)
    assert not threads() & left
