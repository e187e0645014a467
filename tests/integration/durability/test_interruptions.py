"""Workers that are stopped, blocked, cancelled or forked, and clocks that jump: the fence and the log decide."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from store import failpoints, rows
from store.heartbeat import Heartbeat
from tests.integration.durability import facts, operations
from tests.integration.durability.scenarios import open_store

if TYPE_CHECKING:
    from collections.abc import Callable

    from store.rollouts import Store
    from tests.conftest import Database
    from tests.integration.durability.forking import Child, ForkServer

TTL_S = 0.9


async def claimed(store: Store, name: str, ttl_s: float | None = None) -> rows.Lease:
    await store.submit([operations.new_rollout(name)])
    (lease,) = await store.claim(limit=1, ids=[name], ttl_s=ttl_s)
    await store.record(lease, [operations.intent(operations.box(lease))])
    return lease


def stop_outside_a_batch(child: Child, database: Database) -> None:
    """Stop a process at a moment when it does not hold the database, as nearly all moments are."""
    while True:
        child.signal(signal.SIGSTOP)
        with Path(f"{database.file}.lock").open("rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                child.signal(signal.SIGCONT)
            else:
                return


async def lease_until(store: Store, name: str) -> int:
    row = await store.history.rollout(name)
    assert row is not None
    return int(row["lease_until"])


async def until(store: Store, name: str, holds: Callable[[bool], bool]) -> None:
    """Wait until the lease is live, or is not."""
    while not holds(await lease_until(store, name) > time.time() * 1000):
        await asyncio.sleep(0.02)


@pytest.fixture
async def stopped(worker: Store, forks: ForkServer, database: Database):
    """A process that holds a lease on `s1`, stopped until the lease ran out."""
    await worker.submit([operations.new_rollout("s1")])
    with forks.start("note_on_demand", url=database.url, rollout_id="s1", ttl_s=TTL_S) as child:
        assert child.hear() == {"fence": 1}
        child.say("before")
        assert child.hear() == "Applied"
        stop_outside_a_batch(child, database)
        await until(worker, "s1", lambda is_live: not is_live)
        yield child


async def test_a_worker_stopped_past_its_lease_goes_on_when_nobody_claimed(worker: Store, stopped: Child):
    stopped.signal(signal.SIGCONT)
    stopped.say("after")
    assert stopped.hear() == "Applied"
    stopped.say("stop")
    assert stopped.rest() == [[]]
    steps = await worker.history.of_rollout("steps", "s1")
    assert [(step["fence"], step["name"]) for step in steps] == [(1, "after"), (1, "before")]


async def test_a_worker_stopped_past_its_lease_writes_nothing_once_somebody_claimed(
    worker: Store, stopped: Child, database: Database
):
    (lease,) = await worker.claim(limit=1)
    assert (lease.fence, lease.previous) == (2, "crashed")
    before = facts.dump(database.url)
    stopped.signal(signal.SIGCONT)
    for name in ("one", "two", "three"):
        stopped.say(name)
        assert stopped.hear() == "LeaseLost"
    stopped.say("stop")
    assert stopped.rest() in ([[]], [["lost"]])
    assert facts.dump(database.url) == before


async def test_a_blocked_event_loop_loses_its_lease_and_takes_it_back_when_it_runs_again(database: Database):
    store = await open_store(database.url, ttl_s=TTL_S)
    said: list[str] = []
    async with Heartbeat(store) as heartbeat:
        lease = await claimed(store, "b1")
        heartbeat.hold(lease, said.append)
        time.sleep(2.2 * TTL_S)  # noqa: ASYNC251 - this is what the test is about
        ((left_ms,),) = database.ask(
            "SELECT lease_until - CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) FROM rollouts"
        )
        assert left_ms < 0
        await until(store, "b1", lambda is_live: is_live)
        moved = await operations.move(store, lease, "provision")
    assert (moved, said) == (rows.Applied(version=1, state="sandbox_ready"), [])
    await store.close()


CLOCK = "(SELECT CAST(value AS bigint) FROM schema_meta WHERE key = 'clock')"
HOUR_MS = 3_600_000


@pytest.fixture
async def pair(worker: Store, database: Database):
    """Two workers whose database clock is a row of it."""
    database.ask(f"INSERT INTO schema_meta (key, value) VALUES ('clock', '{10 * HOUR_MS}')")
    made = [await open_store(database.url, clock=CLOCK) for _ in range(2)]
    yield made
    for store in made:
        await store.close()


def step_clock(database: Database, to_ms: int) -> None:
    database.ask(f"UPDATE schema_meta SET value = '{to_ms}' WHERE key = 'clock'")


@pytest.mark.databases("sqlite", "postgresql")
async def test_a_clock_that_jumps_ahead_expires_leases_and_the_fence_keeps_that_harmless(
    pair: list[Store], database: Database
):
    one, two = pair
    kept, taken = await claimed(one, "c1"), await claimed(one, "c2")
    step_clock(database, 11 * HOUR_MS)
    assert await operations.move(one, kept, "provision") == rows.LeaseExpired()
    assert await one.reacquire(kept)
    assert isinstance(await operations.move(one, kept, "provision"), rows.Applied)
    (lease,) = await two.claim(limit=2)
    assert (lease.rollout_id, lease.fence) == ("c2", 2)
    assert await operations.move(one, taken, "provision") == rows.LeaseLost(fence=2)
    assert not await one.reacquire(taken)
    assert facts.violations(facts.dump(database.url)) == []


@pytest.mark.databases("sqlite", "postgresql")
async def test_a_clock_that_jumps_back_takes_no_lease_from_anybody(pair: list[Store], database: Database):
    one, two = pair
    lease = await claimed(one, "c1")
    step_clock(database, 9 * HOUR_MS)
    assert await two.claim(limit=1) == []
    assert isinstance(await operations.move(one, lease, "provision"), rows.Applied)
    assert await operations.WRITES["heartbeat"](one, lease) == "kept"
    step_clock(database, 10 * HOUR_MS)
    assert [found.fence for found in await two.claim(limit=1)] == [2]
    assert facts.violations(facts.dump(database.url)) == []


@pytest.mark.databases("sqlite", "postgresql")
async def test_a_caller_that_gave_up_in_the_middle_of_a_write_reads_what_came_of_it(worker: Store):
    lease = await claimed(worker, "g1")
    entered, leave = threading.Event(), threading.Event()

    def stay(point: str) -> None:
        if point == "transition.provision.before_commit":
            entered.set()
            leave.wait()

    failpoints.install(stay)
    writing = asyncio.ensure_future(operations.move(worker, lease, "provision"))
    await asyncio.to_thread(entered.wait)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await writing
    leave.set()
    again = await operations.move(worker, lease, "provision")
    assert again == rows.AlreadyApplied(version=1, state="sandbox_ready")


def test_a_child_forked_inside_a_batch_keeps_nobody_waiting_after_its_parent_was_killed(
    forks: ForkServer, database: Database
):
    with forks.start("fork_in_batch", url=database.url, rollout_id="f1") as parent:
        orphan = parent.hear()["child"]
        parent.signal(signal.SIGKILL)
        try:
            heir = forks.start("failpoint_setup", url=database.url, wanted=[["f2", "created"]], twins=[])
            assert set(heir.hear()) == {"f2"}
            heir.kill()
        finally:
            os.kill(orphan, signal.SIGKILL)
    assert [row["id"] for row in facts.dump(database.url)["rollouts"]] == ["f2"]
