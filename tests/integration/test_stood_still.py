"""Whoever stood still does nothing in a sandbox before its lease was renewed, and nothing at all once that is lost."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.rollout.owned import OwnedSandbox
from orchestrator.rollout.walk import Walk
from orchestrator.testing.sandbox import FakeSandbox
from store.heartbeat import Heartbeat

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Database
    from tests.integration.conftest import Machine

pytestmark = pytest.mark.databases("sqlite")
ACTS: dict[str, Any] = {
    "shell": lambda box: box.shell("touch did", timeout_s=10),
    "run": lambda box: box.run(["touch", "did"], timeout_s=10),
    "write": lambda box: box.write(f"{box.workdir}/did", b""),
    "stop": lambda box: box.stop(),
}


@pytest.mark.parametrize("name", ACTS)
async def test_nothing_is_done_in_a_sandbox_before_its_owner_is_sure(tmp_path: Path, name: str):
    asked, sure = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        asked.set()
        await sure.wait()

    stopped: list[str] = []

    class Watched(FakeSandbox):
        async def stop(self) -> None:
            stopped.append(self.key)

    inner = Watched(tmp_path)
    acting = asyncio.create_task(ACTS[name](OwnedSandbox(inner, wait)))
    await asked.wait()
    assert (list((tmp_path / "work").iterdir()), stopped) == ([], [])
    sure.set()
    await acting
    assert len(list((tmp_path / "work").iterdir())) + len(stopped) == 1


async def test_a_process_that_stood_still_waits_for_its_next_renewal_and_ends_when_its_lease_is_lost(
    machine: Machine, database: Database
):
    now_s = 0.0
    heartbeat = Heartbeat(machine.store, clock=lambda: now_s)
    rollout_id = await machine.submit()
    (lease,) = await machine.store.claim(limit=1)
    walk = await Walk.load(replace(machine.runtime, heartbeat=heartbeat), lease)
    told: list[str] = []
    heartbeat.hold(lease, told.append)
    await walk.sure()

    now_s += machine.store.ttl_s  # as long as the lease lasts: somebody may have claimed the rollout
    waiting = asyncio.create_task(walk.sure())
    done, _ = await asyncio.wait([waiting], timeout=0.2)
    assert not done
    heartbeat.beat()
    await waiting

    now_s += machine.store.ttl_s
    database.ask(f"UPDATE rollouts SET fence = fence + 1, lease_owner = 'another' WHERE id = '{rollout_id}'")
    waiting = asyncio.create_task(walk.sure())
    heartbeat.beat()
    await asyncio.sleep(0)
    assert told == ["lost"]
    assert not waiting.done()
    waiting.cancel()


async def test_every_sandbox_of_a_walk_is_its_owners(machine: Machine, monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []

    async def sure(walk: Walk) -> None:
        asked.append(walk.state.value)

    monkeypatch.setattr(Walk, "sure", sure)
    await machine.play(
        {"tool_calls": [{"name": "bash", "arguments": {"command": "touch new"}}]},
        {"tool_calls": [{"name": "submit"}]},
    )
    assert set(asked) == {"created", "sandbox_ready", "agent_running", "patched"}
