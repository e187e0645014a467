"""The writer's queue: bounded, shared by loops and threads, emptied by a close, and never the end of a caller."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from store import errors, failpoints, rows
from store.writer import BATCH, CAPACITY
from tests.integration.durability import facts, operations

if TYPE_CHECKING:
    from store.rollouts import Store
    from tests.conftest import Database


class Gate:
    """Holds the writer inside its first batch until it is opened."""

    def __init__(self) -> None:
        self.entered, self._leave = threading.Event(), threading.Event()
        failpoints.install(self._pass)

    def _pass(self, _point: str) -> None:
        self.entered.set()
        self._leave.wait()

    def open(self) -> None:
        self._leave.set()


def ask(store: Store, number: int) -> asyncio.Task[int]:
    """Queue a write that does nothing but give its number back."""
    return asyncio.create_task(store._writer.write("record", lambda _connection: number))


async def test_callers_wait_for_room_in_a_full_queue_and_all_are_answered(worker: Store):
    gate = Gate()
    first = ask(worker, 0)
    await asyncio.to_thread(gate.entered.wait)
    tasks = [ask(worker, number) for number in range(CAPACITY + 2 * BATCH)]
    await asyncio.sleep(0)
    assert len(worker._writer._queue) == CAPACITY
    assert len(worker._writer._waiting) == 2 * BATCH
    gate.open()
    assert await asyncio.gather(first, *tasks) == [0, *range(len(tasks))]


@pytest.mark.long
async def test_callers_who_gave_up_waiting_take_nobodys_turn(worker: Store):
    gate = Gate()
    first = ask(worker, 0)
    await asyncio.to_thread(gate.entered.wait)
    queued = [ask(worker, number) for number in range(CAPACITY)]
    gone = [ask(worker, number) for number in range(CAPACITY + 2 * BATCH)]
    last = [ask(worker, number) for number in range(BATCH)]
    await asyncio.sleep(0)
    for task in gone:
        task.cancel()
    await asyncio.gather(*gone, return_exceptions=True)
    gate.open()
    async with asyncio.timeout(30):
        assert await asyncio.gather(first, *queued, *last) == [0, *range(CAPACITY), *range(BATCH)]


@pytest.mark.long
async def test_a_close_stores_what_is_queued_and_tells_those_who_wait_for_room(worker: Store):
    gate = Gate()
    first = ask(worker, 0)
    await asyncio.to_thread(gate.entered.wait)
    queued = [ask(worker, number) for number in range(CAPACITY)]
    waiting = [ask(worker, number) for number in range(CAPACITY + 2 * BATCH)]
    await asyncio.sleep(0)
    closing = asyncio.create_task(worker._writer.close())
    await asyncio.sleep(0)
    gate.open()
    async with asyncio.timeout(30):
        told = await asyncio.gather(*waiting, return_exceptions=True)
        assert {type(answer) for answer in told} == {errors.StoreClosed}
        assert await asyncio.gather(first, *queued) == [0, *range(CAPACITY)]
        await closing


@pytest.mark.databases("sqlite", "postgresql")
async def test_three_event_loops_in_three_threads_write_through_one_store(worker: Store, database: Database):
    names = [f"loop{n}-{m:02d}" for n in range(3) for m in range(20)]
    await worker.submit([operations.new_rollout(name) for name in names])
    leases = {lease.rollout_id: lease for lease in await worker.claim(limit=len(names))}
    together = threading.Barrier(3)

    async def work(part: list[str]) -> list[rows.Outcome]:
        together.wait()
        steps = [
            worker.record(leases[name], [rows.StepRow(name=f"turn-{turn}", output={})])
            for name in part
            for turn in range(5)
        ]
        return list(await asyncio.gather(*steps))

    with ThreadPoolExecutor(3) as pool:
        loops = [pool.submit(asyncio.run, work(names[n * 20 : n * 20 + 20])) for n in range(3)]
        outcomes = [o for part in loops for o in await asyncio.wrap_future(part)]
    assert outcomes == [rows.Applied(version=0, state="created")] * 300
    assert len(facts.dump(database.url)["steps"]) == 300


async def test_a_loop_that_is_closed_before_its_answer_harms_nobody_else(worker: Store):
    gate = Gate()

    async def leave() -> None:
        ask_for = asyncio.ensure_future(worker.request_cancel("nobody"))
        await asyncio.to_thread(gate.entered.wait)
        ask_for.cancel()
        with suppress(asyncio.CancelledError):
            await ask_for

    await asyncio.to_thread(asyncio.run, leave())
    gate.open()
    assert not await worker.request_cancel("nobody")


@pytest.mark.databases("sqlite", "postgresql")
async def test_a_writer_that_dies_while_it_stores_a_poisoned_batch_one_by_one_doubles_nothing(
    worker: Store, database: Database, caplog: pytest.LogCaptureFixture
):
    names = [f"p{number}" for number in range(6)]
    await worker.submit([operations.new_rollout(name) for name in names])
    leases = sorted(await worker.claim(limit=len(names)), key=lambda lease: lease.rollout_id)
    twice: list[rows.Row] = [rows.StepRow(name="same", output={})] * 2
    passed: list[str] = []

    def die(point: str) -> None:
        passed.append(point)
        if point == "record.after_commit" and passed.count(point) == 4:
            raise KeyboardInterrupt(point)

    failpoints.install(die)
    outcomes = await asyncio.gather(
        *(worker.record(lease, [operations.call()] if n else twice) for n, lease in enumerate(leases)),
        return_exceptions=True,
    )
    failpoints.install(None)
    assert isinstance(outcomes[0], Exception)
    assert outcomes[1:] == [rows.Applied(version=0, state="created")] * 5
    assert "the writer thread died" in caplog.text
    calls = [row["rollout_id"] for row in facts.dump(database.url)["llm_calls"]]
    assert calls == names[1:]
