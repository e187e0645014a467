"""Sandboxes of no rollout in the ledger: who may give them up, on every kind of database."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from store import rows, workers

if TYPE_CHECKING:
    from store.rollouts import Store

pytestmark = pytest.mark.databases

LIVE = rows.SandboxLive(key="box", provider_ids=["id"], isolation="bwrap")


def intent(key: str, timeout_s: float = 600) -> rows.SandboxIntent:
    return rows.SandboxIntent(
        key=key, role="grading", provider="local", provider_ref="there", env_name=None, ttl_s=60,
        create_timeout_s=timeout_s,
    )  # fmt: skip


async def status(store: Store) -> list[tuple[object, ...]]:
    query = "SELECT status, rollout_id, proof FROM sandboxes"
    return (await store.history.sql(query, limit=9, timeout_s=5)).rows


async def test_a_declared_sandbox_walks_to_its_proof(store: Store):
    await store.declare_sandbox(intent("box"))
    assert await status(store) == [("intent", None, None)]
    await store.note_live_sandbox(LIVE)
    assert await status(store) == [("live", None, None)]
    assert not await store.close_sandbox("box", "too early")
    await store.give_up_sandbox("box")
    await store.note_live_sandbox(LIVE)
    assert await status(store) == [("releasing", None, None)]
    assert await store.close_sandbox("box", "gone")
    await store.give_up_sandbox("box")
    assert await status(store) == [("released", None, "gone")]
    await store.give_up_sandbox("never declared")


async def test_only_a_worker_that_is_gone_loses_its_sandboxes(store: Store, open_store):
    other = await open_store()
    await other.declare_sandbox(intent("box", timeout_s=-1))
    owner = {"box": other.worker.worker_id}
    try:
        assert await store.give_up_abandoned(owner.get) == []
    finally:
        await other.close()
    assert await store.give_up_abandoned(owner.get) == [("box", "there")]
    assert await status(store) == [("releasing", None, None)]
    assert await store.give_up_abandoned(owner.get) == [("box", "there")], "tried again until there is proof"
    await store.close_sandbox("box", "gone")
    assert await store.give_up_abandoned(owner.get) == []


async def test_a_sandbox_of_an_unknown_worker_is_given_up_past_its_deadline(store: Store):
    await store.declare_sandbox(intent("young"))
    await store.declare_sandbox(intent("old", timeout_s=-1))
    assert await store.give_up_abandoned(lambda _key: None) == [("old", "there")]
    assert await store.give_up_abandoned(lambda _key: "nobody") == [("old", "there")]


def test_a_process_is_only_called_gone_where_that_can_be_seen():
    here = workers.this_process("me")
    own = workers.Recorded.of({**asdict(here), "heartbeat_at": time.time_ns() // 1_000_000})
    assert workers.runs(own, here) is True
    assert workers.runs(replace(own, pid_started="1"), here) is False
    assert workers.runs(replace(own, boot_id="before", heartbeat_at=1), here) is False
    assert workers.runs(replace(own, boot_id="before"), here) is None, "another machine of the same name"
    assert workers.runs(replace(own, host="elsewhere"), here) is None
    assert workers.runs(replace(own, pid_ns="another"), here) is None
    assert workers.runs(own, replace(here, pid_ns="")) is None
    with subprocess.Popen(["true"]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        started = _started(child.pid)
        assert workers.runs(replace(own, pid=child.pid, pid_started=started), here) is False, "a zombie"
    assert workers.runs(replace(own, pid=child.pid, pid_started=started), here) is False


def _started(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
