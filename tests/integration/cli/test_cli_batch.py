"""The claim loop of `rollouts run` beside another process that works on the same run."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from orchestrator.cli import batch
from orchestrator.cli.chains import Chains
from orchestrator.cli.progress import Progress
from store import rows

if TYPE_CHECKING:
    import pytest

    from tests.conftest import Database
    from tests.integration.conftest import Machine


async def test_a_rollout_that_another_process_has_graded_and_still_releases_is_waited_for(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
):
    rollout_id = await machine.submit()
    (lease,) = await machine.store.claim(limit=1)
    for trigger in ("provision", "start_agent", "take_patch", "grade"):
        moved = await machine.store.transition(lease, trigger, op_id=trigger)
        assert isinstance(moved, rows.Applied)
        lease = replace(lease, version=moved.version)

    told: asyncio.Queue[str] = asyncio.Queue()
    monkeypatch.setattr(batch, "say", told.put_nowait)
    chains = Chains([], await machine.store.history.overview(run_id="run"), retries=0)
    work = batch.Batch(
        machine.runtime, "run", [rollout_id], concurrency=1, progress=Progress("run"), chains=chains
    )
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(work.work())
        assert f"held by worker {machine.store.worker.worker_id}" in await told.get()
        assert isinstance(await machine.store.transition(lease, "release", op_id="release"), rows.Applied)
    assert told.empty()


async def test_a_rollout_of_a_later_state_machine_is_left_and_not_waited_for(
    machine: Machine, database: Database, monkeypatch: pytest.MonkeyPatch
):
    rollout_id = await machine.submit()
    database.ask("UPDATE rollouts SET fsm_version = 99")
    told: list[str] = []
    monkeypatch.setattr(batch, "say", told.append)
    chains = Chains([], await machine.store.history.overview(run_id="run"), retries=0)
    work = batch.Batch(
        machine.runtime, "run", [rollout_id], concurrency=1, progress=Progress("run"), chains=chains
    )
    await work.work()
    assert work.left == {rollout_id}
    newer = "a newer version of this program submitted it: continue it with that"
    assert told == [f"left: {rollout_id}: {newer}"]
