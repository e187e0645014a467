"""What the ledger already says at the moment a provider is called."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

from orchestrator import errors, rollout
from orchestrator.states import State

if TYPE_CHECKING:
    from tests.integration.conftest import Machine


async def test_the_intent_is_durable_before_the_create_call_goes_out(machine: Machine):
    seen: list[list[tuple[str]]] = []

    def look(call: str, _number: int) -> BaseException | None:
        if call == "create:task":
            with closing(sqlite3.connect(str(machine.store.url.database))) as raw:
                seen.append(raw.execute("SELECT status FROM sandboxes").fetchall())
        return errors.TaskInvalid("enough") if call == "create:task" else None

    machine.provider.fault = look
    rollout_id = await machine.submit()
    ending = await rollout.run(machine.runtime, rollout_id)
    assert ending.state is State.FAILED
    assert seen == [[("intent",)]]


async def test_a_sandbox_whose_removal_failed_stays_open_in_the_ledger(machine: Machine):
    seen: list[list[tuple[str]]] = []

    def look(call: str, _number: int) -> BaseException | None:
        if call == "create:task":
            return errors.TaskInvalid("enough")
        with closing(sqlite3.connect(str(machine.store.url.database))) as raw:
            seen.append(raw.execute("SELECT status FROM sandboxes").fetchall())
        return errors.SandboxLost("the provider does not answer")

    machine.provider.fault = look
    rollout_id = await machine.submit()
    await rollout.run(machine.runtime, rollout_id)
    (row,) = await machine.rows("sandboxes", rollout_id)
    assert seen == [[("releasing",)]], "not closed before the provider was asked"
    assert (row["status"], row["proof"], row["release_attempts"]) == ("releasing", None, 1)
