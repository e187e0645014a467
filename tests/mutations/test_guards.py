"""One small test per guard of the store, so that a guard that is gone is missed within a second or two."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa

from orchestrator.states import EDGES, State
from store import engine, errors, failpoints, leases, rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from store.rollouts import Store

    New = Callable[..., rows.NewRollout]

FIXED = 1_900_000_000_000
STEP = rows.StepRow(name="turn-0001", output={})
INTENT = rows.SandboxIntent(
    key="rw-1", role="task", provider="local", provider_ref="here", env_name=None, ttl_s=60, create_timeout_s=5
)  # fmt: skip


@pytest.fixture
async def lease(store: Store, new_rollout: New) -> rows.Lease:
    await store.submit([new_rollout()])
    (claimed,) = await store.claim(limit=1)
    return claimed


async def overtaken(store: Store, new_rollout: New) -> tuple[rows.Lease, rows.Lease]:
    """Return a lease that ran out at once, and the one of the next claim."""
    await store.submit([new_rollout()])
    (old,) = await store.claim(limit=1, ttl_s=-1)
    (new,) = await store.claim(limit=1)
    return old, new


async def kept(store: Store, lease: rows.Lease) -> tuple[str, int, int]:
    row = await store.history.rollout(lease.rollout_id)
    assert row is not None
    return row["state"], row["version"], len(await store.history.of_rollout("steps", lease.rollout_id))


async def test_a_move_under_an_old_fence_changes_nothing(store: Store, new_rollout: New):
    old, _ = await overtaken(store, new_rollout)
    assert await store.transition(old, "provision", op_id="x") == rows.LeaseLost(fence=2)
    assert await kept(store, old) == ("created", 0, 0)


async def test_evidence_under_an_old_fence_changes_nothing(store: Store, new_rollout: New):
    old, _ = await overtaken(store, new_rollout)
    assert await store.record(old, [STEP]) == rows.LeaseLost(fence=2)
    assert await kept(store, old) == ("created", 0, 0)


async def test_a_fence_that_this_database_never_gave_is_a_lost_lease(store: Store, lease: rows.Lease):
    """As after a restored backup: the worker is ahead of the rows."""
    ahead = replace(lease, fence=lease.fence + 1)
    assert await store.transition(ahead, "provision", op_id="x") == rows.LeaseLost(fence=1)
    assert await store.record(ahead, [STEP]) == rows.LeaseLost(fence=1)
    assert await kept(store, lease) == ("created", 0, 0)


async def test_a_move_from_an_old_version_changes_nothing(store: Store, lease: rows.Lease):
    await store.transition(lease, "provision", op_id="one")
    late = await store.transition(lease, "fail", op_id="two", failure=("internal", "x"))
    assert late == rows.VersionConflict(version=1, state="sandbox_ready")
    assert await kept(store, lease) == ("sandbox_ready", 1, 0)


async def test_a_lease_that_ran_out_changes_nothing(store: Store, new_rollout: New):
    await store.submit([new_rollout()])
    (late,) = await store.claim(limit=1, ttl_s=-1)
    assert await store.transition(late, "provision", op_id="x") == rows.LeaseExpired()
    assert await store.record(late, [STEP]) == rows.LeaseExpired()
    assert await kept(store, late) == ("created", 0, 0)


async def test_a_trigger_without_an_edge_is_an_error(store: Store, lease: rows.Lease):
    for trigger in ("grade", "release"):  # a plain move, and one that would end the rollout
        with pytest.raises(errors.IllegalTransition):
            await store.transition(lease, trigger, op_id=trigger)


async def test_an_open_sandbox_keeps_a_rollout_from_being_released(store: Store, lease: rows.Lease):
    await store.record(lease, [INTENT])
    for version, trigger in enumerate(("provision", "start_agent", "take_patch", "grade")):
        await store.transition(replace(lease, version=version), trigger, op_id=trigger)
    with pytest.raises(errors.Conflict, match="rw-1"):
        await store.transition(replace(lease, version=4), "release", op_id="release")


async def test_only_a_sandbox_that_was_given_up_can_be_closed(store: Store, lease: rows.Lease):
    await store.record(lease, [INTENT])
    assert not await store.close_sandbox("rw-1", "gone")


async def test_a_heartbeat_extends_only_the_fence_it_names(store: Store, new_rollout: New):
    old, new = await overtaken(store, new_rollout)
    for extend in (leases.renew, leases.reacquire):
        for lease, expected in ((old, {}), (new, {new.rollout_id: False})):
            assert await extended(store, extend, lease) == expected


async def extended(store: Store, extend: Any, lease: rows.Lease) -> dict[str, bool]:
    pairs = [(lease.rollout_id, lease.fence)]
    worker_id = store.worker.worker_id
    return await store._writer.write(
        "heartbeat", lambda c: extend(c, store.dialect, worker_id, pairs, ttl_ms=60_000)
    )


async def test_every_time_is_the_databases_time(open_store: Callable[..., Any], new_rollout: New):
    store = await open_store(now_sql=f"CAST({FIXED} AS INTEGER)")
    try:
        await store.submit([new_rollout()])
        (lease,) = await store.claim(limit=1, ttl_s=60)
        await store.transition(lease, "provision", op_id="x", extra=[STEP, INTENT])
        row = await store.history.rollout(lease.rollout_id)
        assert (row["created_at"], row["updated_at"], row["lease_until"]) == (FIXED, FIXED, FIXED + 60_000)
        for table, columns in (
            ("attempts", ("claimed_at",)), ("transitions", ("at",)), ("steps", ("at",)), ("sandboxes", ("intent_at",)),
        ):  # fmt: skip
            (found,) = await store.history.of_rollout(table, lease.rollout_id)
            assert [found[column] for column in columns] == [FIXED]
        assert await store.request_cancel(lease.rollout_id)
        assert (await store.history.rollout(lease.rollout_id))["cancel_requested_at"] == FIXED
    finally:
        await store.close()


async def test_the_writers_connection_waits_for_the_disk(store: Store):
    writing = engine.write_engine(store.url)
    with writing.connect() as connection:
        found = [connection.exec_driver_sql(f"PRAGMA {p}").scalar() for p in ("journal_mode", "synchronous")]
    writing.dispose()
    assert found == ["wal", 2]


async def test_nobody_is_answered_before_the_commit(store: Store, lease: rows.Lease):
    loop, seen = asyncio.get_running_loop(), []

    async def look() -> None:
        for _ in range(20):  # an answer takes some turns of the loop to reach who waits for it
            await asyncio.sleep(0)
        seen.append(write.done())

    def at_commit(_connection: object) -> None:
        asyncio.run_coroutine_threadsafe(look(), loop).result(timeout=10)

    write = asyncio.create_task(store.record(lease, [STEP]))
    sa.event.listen(store._writer._engine, "commit", at_commit)
    await write
    assert seen == [False]


@contextmanager
def one_lost_answer(store: Store) -> Iterator[None]:
    """The next commit takes place, and its answer is lost."""
    dialect: Any = store._writer._engine.dialect
    commit = dialect.do_commit

    def lossy(connection: Any) -> None:
        commit(connection)
        dialect.do_commit = commit
        lost = sqlite3.OperationalError("disk I/O error")
        lost.sqlite_errorname = "SQLITE_IOERR"
        raise lost

    dialect.do_commit = lossy
    try:
        yield
    finally:
        dialect.do_commit = commit


async def test_a_claim_whose_commit_was_not_answered_is_not_made_twice(store: Store, new_rollout: New):
    await store.submit([new_rollout()])
    with one_lost_answer(store):
        (lease,) = await store.claim(limit=1)
    attempts = await store.history.of_rollout("attempts", lease.rollout_id)
    assert (lease.fence, len(attempts)) == (1, 1)


async def test_moves_of_one_rollout_that_were_queued_together_are_made_in_their_order(
    store: Store, lease: rows.Lease
):
    line = ("provision", "start_agent", "take_patch", "grade")
    moves = [store.transition(replace(lease, version=n), t, op_id=t) for n, t in enumerate(line)]
    outcomes = await asyncio.gather(*moves)
    assert [type(outcome) for outcome in outcomes] == [rows.Applied] * 4


async def test_the_database_keeps_the_evidence_of_every_attempt(store: Store, lease: rows.Lease):
    await store.record(lease, [STEP])
    for statement in ("DELETE FROM steps", "UPDATE steps SET output = ''", "DELETE FROM attempts"):
        with pytest.raises(sa.exc.IntegrityError):
            await past_the_store(store, statement)


async def past_the_store(store: Store, statement: str) -> None:
    await store._writer.write("record", lambda c: c.exec_driver_sql(statement))


def test_only_release_leaves_graded():
    assert [trigger for state, trigger in EDGES if state is State.GRADED] == ["release"]


async def test_a_claim_raises_the_fence(store: Store, new_rollout: New):
    old, new = await overtaken(store, new_rollout)
    assert (old.fence, new.fence) == (1, 2)


async def test_a_write_that_breaks_inside_its_transaction_leaves_nothing(store: Store, lease: rows.Lease):
    def explode(point: str) -> None:
        if point == "record.before_commit":
            raise RuntimeError(point)

    failpoints.install(explode)
    try:
        with pytest.raises(RuntimeError, match="before_commit"):
            await store.record(lease, [STEP])
    finally:
        failpoints.install(None)
    assert await kept(store, lease) == ("created", 0, 0)
