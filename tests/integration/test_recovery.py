"""Self-heal and the releases that wait: nothing of them stops what a process came for, and nothing is waited for."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from orchestrator import recovery, rollout
from orchestrator.errors import SandboxLost
from orchestrator.states import State

if TYPE_CHECKING:
    from tests.conftest import Database
    from tests.integration.conftest import Machine

IDLE = {"tool_calls": [{"name": "submit"}]}
LOOK = {"tool_calls": [{"name": "bash", "arguments": {"command": "touch new"}}]}
pytestmark = [pytest.mark.long, pytest.mark.databases("sqlite")]


async def stuck(machine: Machine) -> str:
    """Run a rollout whose sandboxes cannot be proven gone."""
    machine.provider.fault = lambda name, _n: SandboxLost("no answer") if name == "release" else None
    rollout_id = await machine.submit()
    ending = await machine.serve(rollout_id, LOOK, IDLE)
    assert (ending.state, ending.reward) == (State.GRADED, 0.0)
    assert "not proven gone" in ending.message
    return rollout_id


async def test_a_graded_rollout_waits_for_no_release_and_is_released_when_the_provider_answers(
    machine: Machine,
):
    rollout_id = await stuck(machine)
    await recovery._release_due(machine.runtime, {})
    assert (await rollout.answer(machine.store, rollout_id)).state is State.GRADED
    machine.provider.fault = lambda _name, _n: None
    await machine.store.close_sandbox(
        "nothing", ""
    )  # the row is due again only later; a person's clean is not needed
    for lease in await machine.store.claim(limit=1, ids=[rollout_id], early=True):
        await rollout.advance(machine.runtime, lease)
    assert (await rollout.answer(machine.store, rollout_id)).state is State.RELEASED
    await machine.check_nothing_is_left()


async def test_who_stood_still_while_a_release_failed_leaves_the_graded_rollout_to_its_new_owner(
    machine: Machine, database: Database
):
    def claimed_meanwhile(name: str, _number: int) -> SandboxLost | None:
        if name != "release":
            return None
        database.ask("UPDATE rollouts SET fence = fence + 1, lease_owner = 'another' WHERE state = 'graded'")
        return SandboxLost("no answer")

    machine.provider.fault = claimed_meanwhile
    rollout_id = await machine.submit()
    ending = await machine.serve(rollout_id, IDLE)
    assert (ending.state, ending.reward) == (State.GRADED, 0.0)
    assert database.ask("SELECT lease_owner FROM rollouts") == [("another",)]
    assert database.ask("SELECT outcome FROM attempts") == [(None,)], "nothing is written under an old fence"


async def test_healing_waits_for_nobody_and_survives_what_it_cannot_settle(
    machine: Machine, database: Database
):
    rollout_id = await stuck(machine)
    database.ask("UPDATE sandboxes SET release_attempts = 5000")
    database.ask("UPDATE rollouts SET endpoint_kind = 'session', not_before = 0")
    database.ask("UPDATE workers SET stopping = 1")
    machine.provider.fault = lambda name, _n: RuntimeError("a bug") if name == "release" else None
    await recovery.heal(replace(machine.runtime, serves_sessions=False))
    machine.provider.fault = lambda _name, _n: None
    database.ask("UPDATE rollouts SET not_before = 0")
    due: dict[str, float] = {}
    await recovery._release_due(machine.runtime, due)
    assert due == {}
    assert (await rollout.answer(machine.store, rollout_id)).state is State.RELEASED


async def test_a_rollout_whose_input_cannot_be_read_any_more_fails_at_once(
    machine: Machine, database: Database
):
    rollout_id = await machine.submit()
    (row,) = database.ask("SELECT input FROM rollouts")
    stored = json.loads(row[0]) if isinstance(row[0], str) else row[0]
    stored["settings"]["agent"]["no_such_setting"] = 1
    text = json.dumps(stored).replace("'", "''")
    database.ask(f"UPDATE rollouts SET input = '{text}'")
    ending = await rollout.run(machine.runtime, rollout_id)
    assert (ending.state, ending.failure_class) == (State.FAILED, "internal")
    assert "cannot be read by this version" in ending.message


async def test_a_rollout_whose_task_is_damaged_fails_at_once_and_stops_nothing_else(
    machine: Machine, database: Database
):
    rollout_id = await machine.submit()
    for (name,) in database.ask("SELECT name FROM sqlite_master WHERE type = 'trigger'"):
        database.ask(f"DROP TRIGGER {name}")
    database.ask("UPDATE artifacts SET bytes = x'00', codec = 'zlib'")
    ending = await rollout.run(machine.runtime, rollout_id)
    assert (ending.state, ending.failure_class) == (State.FAILED, "internal")
    assert "is damaged" in ending.message


async def test_who_submitted_a_session_and_still_lives_keeps_it(machine: Machine, database: Database):
    rollout_id = await machine.submit()
    database.ask("UPDATE rollouts SET endpoint_kind = 'session'")
    (row,) = await machine.store.history.unfinished()
    own = {**row, "input": {**row["input"], "origin": {"worker": machine.store.worker.worker_id}}}
    assert not await recovery.is_orphan(machine.store, own)
    assert not await recovery.is_orphan(machine.store, row), "nobody knows who asked for it"
    database.ask("UPDATE workers SET stopping = 1")
    assert await recovery.is_orphan(machine.store, own)
    assert rollout_id == row["id"]


async def test_of_two_cleans_at_once_only_one_says_that_it_removed_a_sandbox(machine: Machine):
    await stuck(machine)
    machine.provider.fault = lambda _name, _n: None
    rows = await machine.store.history.open_sandboxes()
    assert len(rows) > 0
    both = await asyncio.gather(
        *(recovery.clean(machine.store, lambda _name: machine.provider) for _ in range(2))
    )
    told = [[swept.outcome for swept in done.swept] for done in both]
    assert sum(outcomes.count("removed") for outcomes in told) == len(rows), told
    assert all(done.clean for done in both), told
    late = await recovery._released(machine.store, lambda _name: machine.provider, rows[0], 60.0)
    assert (late.outcome, late.detail) == ("gone", "somebody else removed it meanwhile")
    assert recovery.Cleaned(swept=[late]).clean
    assert recovery.Cleaned(swept=[late]).counts.startswith(
        "0 sandboxes removed, 1 by somebody else meanwhile"
    )
