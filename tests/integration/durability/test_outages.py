"""The database goes away under work: nothing is lost, nobody fails, and what takes too long is said."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from store import changes, errors, rows
from store.heartbeat import Heartbeat
from tests.integration.durability import facts, operations
from tests.integration.durability.forking import ROOT
from tests.integration.durability.scenarios import open_store

if TYPE_CHECKING:
    from store.rollouts import Store
    from tests.integration.durability.conftest import Away

TTL_S = 0.6
CLOSED_IN_S = 5.0


async def begun(store: Store, name: str) -> rows.Lease:
    await store.submit([operations.new_rollout(name)])
    (lease,) = await store.claim(limit=1, ids=[name])
    await store.record(lease, [operations.intent(operations.box(lease))])
    return lease


async def write(store: Store, lease: rows.Lease, trigger: str) -> rows.Outcome:
    """Move as the driver does: a lease that ran out is taken back first, if nobody claimed."""
    outcome = await operations.move(store, lease, trigger)
    if isinstance(outcome, rows.LeaseExpired) and await store.reacquire(lease):
        outcome = await operations.move(store, lease, trigger)
    return outcome


async def test_a_database_that_is_away_for_longer_than_a_lease_costs_no_rollout(away: Away):
    store = await open_store(away.url, ttl_s=TTL_S)
    said: list[str] = []
    async with Heartbeat(store) as heartbeat:
        lease = await begun(store, "out1")
        heartbeat.hold(lease, said.append)
        await asyncio.to_thread(away.begin)
        writing = asyncio.ensure_future(write(store, lease, "provision"))
        done, _ = await asyncio.wait([writing], timeout=4 * TTL_S)
        assert not done
        await asyncio.to_thread(away.end)
        assert await writing == rows.Applied(version=1, state="sandbox_ready")
        later = operations.lease_of("out1", fence=lease.fence, version=1)
        assert await write(store, later, "start_agent") == rows.Applied(version=2, state="agent_running")
        row = await store.history.rollout("out1")
        assert row is not None
        assert (row["fence"], row["lease_owner"], row["crash_count"]) == (1, store.worker.worker_id, 0)
    assert said == []
    await store.close()
    assert facts.violations(facts.dump(away.url, "out1")) == []


async def test_a_database_that_is_away_for_too_long_is_said_and_work_goes_on_when_it_is_back(away: Away):
    store = await open_store(away.url, outage_s=0.3)
    lease = await begun(store, "out2")
    await asyncio.to_thread(away.begin)
    with pytest.raises(errors.StoreUnreachable, match="did not take 1 writes"):
        await operations.move(store, lease, "provision")
    await asyncio.to_thread(away.end)
    again = await operations.move(store, lease, "provision")
    assert isinstance(again, rows.Applied | rows.AlreadyApplied)
    await store.close()


CLOSE_WITHOUT_DATABASE = """
import asyncio, json, sys, time
from store import errors
from store.heartbeat import Heartbeat
from tests.integration.durability.scenarios import open_store

async def main():
    store = await open_store(sys.argv[1])
    async with Heartbeat(store):
        print("open", flush=True)
        sys.stdin.readline()
        writes = [asyncio.ensure_future(store.request_cancel("any")) for _ in range(1000)]
        await asyncio.wait(writes, timeout=0.2)
        try:
            await store.close()
        except errors.StoreUnreachable:
            pass
    told = await asyncio.gather(*writes, return_exceptions=True)
    return {type(t).__name__ for t in told}

print(json.dumps(sorted(asyncio.run(main()))), flush=True)
"""


def test_a_process_ends_in_seconds_although_the_database_is_away(away: Away):
    with subprocess.Popen(
        [sys.executable, "-c", CLOSE_WITHOUT_DATABASE, away.url],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        away.begin()
        started = time.monotonic()
        out, _ = process.communicate("close\n", timeout=60)
        took_s = time.monotonic() - started
    assert json.loads(out) == ["StoreUnreachable"]
    assert process.returncode == 0
    assert took_s < CLOSED_IN_S


async def test_a_release_that_was_refused_for_what_is_over_since_is_tried_again(worker: Store):
    """The guard and the question why it refused see two moments; a heartbeat may renew the lease between them."""
    await worker.submit([operations.new_rollout("out3")])
    (lease,) = await worker.claim(limit=1, ids=["out3"])
    lease = await operations.bring(worker, lease, "graded")
    await operations.close_boxes(worker, "out3")
    change = changes.Change(lease=lease, extra=[], trigger="release", op_id="out3-release")
    why = await worker._writer.write("record", lambda c: changes._classify(c, worker.dialect, change))
    assert why == rows.LeaseExpired()
    assert await worker.reacquire(lease)
    assert await operations.move(worker, lease, "release") == rows.Applied(version=5, state="released")


async def test_a_release_beside_an_open_sandbox_names_it(worker: Store):
    await worker.submit([operations.new_rollout("out4")])
    (lease,) = await worker.claim(limit=1, ids=["out4"])
    box = operations.box(lease)
    lease = await operations.bring(worker, lease, "graded")
    with pytest.raises(errors.Conflict, match=f"out4 still owns sandboxes: .*{box}"):
        await operations.move(worker, lease, "release")
