"""A store that is away, a caller that dies, keys and records of every odd kind: no call is answered late or wrongly."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, Self

import pytest

from aweagent.runner import run_agent_return_reward
from orchestrator import entry
from orchestrator.areal import RolloutDropped, RolloutWorkflow
from orchestrator.rollout import driver
from orchestrator.testing.replay import parse_replay
from tests.integration.areal.conftest import EXAMPLES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from orchestrator.testing.areal_proxy import FakeProxy

ROOT = EXAMPLES.parent
IDLE = {"*": [{"name": "idle", "turns": [{"tool_calls": [{"name": "submit"}]}]}]}
SLOW = {"*": [{"name": "slow", "turns": [{"fault": {"delay_s": 600.0}}]}]}


@pytest.fixture
def own(config: str) -> RolloutWorkflow:
    return RolloutWorkflow({"agent_config": config})


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep the store for ourselves, as a backup that hangs would."""
    with closing(sqlite3.connect(folder / "store" / "rollouts.db", timeout=30)) as raw:
        raw.isolation_level = None
        raw.execute("BEGIN IMMEDIATE")
        yield
        raw.execute("ROLLBACK")


def over(query: Any) -> None:
    assert query("select count(*) from rollouts where state not in ('released', 'failed')") == [(0,)]
    assert query("select count(*) from sandboxes where status <> 'released'") == [(0,)]


@pytest.mark.long
async def test_a_call_is_answered_by_its_deadline_while_the_store_is_away(
    own: RolloutWorkflow, config: str, proxy: FakeProxy, record: dict[str, Any], query: Any, tmp_path: Path
):
    proxy.script = parse_replay(IDLE)
    assert await own.run(record, base_url=proxy.base_url, api_key=proxy.session("any")) == 0.0
    hasty = RolloutWorkflow({"agent_config": config}, timeout=6.0)
    with locked(tmp_path):
        began = time.monotonic()
        with pytest.raises(RolloutDropped, match="deadline of 5 s is over"):
            await hasty.run(record, base_url=proxy.base_url, api_key=proxy.session("any"))
        assert time.monotonic() - began < 6.0, f"load {os.getloadavg()[0]:.1f}"
    await entry.close()
    over(query)


@pytest.mark.long
async def test_a_call_that_is_cancelled_while_the_store_is_away_ends_its_rollout_when_it_is_back(
    own: RolloutWorkflow, proxy: FakeProxy, record: dict[str, Any], query: Any, tmp_path: Path
):
    proxy.script = parse_replay(SLOW)
    key = proxy.session("any")
    call = asyncio.create_task(own.run(record, base_url=proxy.base_url, api_key=key))
    await proxy.wait_for(lambda p: p.sessions[key].requests >= 1)
    with locked(tmp_path):
        began = time.monotonic()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert time.monotonic() - began < 1.0, f"load {os.getloadavg()[0]:.1f}"
        await asyncio.sleep(driver._CLEANUP_S + 1.0)  # longer than a caller would wait for it
    await entry.close()
    over(query)
    assert query("select failure_class from rollouts") == [("cancelled",)]


CALL = """
import asyncio, json, sys
from aweagent.runner import run_agent_return_reward
print(asyncio.run(run_agent_return_reward(json.loads(sys.argv[1]))))
"""


async def outside(record: dict[str, Any], **more: Any) -> asyncio.subprocess.Process:
    """Make the call in a process of its own."""
    text = json.dumps({**record, **more}, default=str)
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", CALL, text, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


@pytest.mark.long
async def test_a_session_that_was_asked_before_its_caller_died_is_not_asked_again(
    proxy: FakeProxy, record: dict[str, Any], query: Any
):
    proxy.script = parse_replay(SLOW)
    key = proxy.session("any")
    asked = {"override_api_key": key, "override_base_url": proxy.base_url}
    dying = await outside(record, **asked)
    await proxy.wait_for(lambda p: p.sessions[key].requests >= 1)
    dying.kill()
    await dying.communicate()
    assert query("select state from rollouts") == [("agent_running",)]
    assert query("select count(*) from llm_calls") == [(0,)]
    proxy.script = parse_replay(IDLE)
    reward, _ = await run_agent_return_reward({**record, **asked})
    assert (reward, proxy.sessions[key].requests) == (None, 1)
    assert query("select failure_class from rollouts") == [("worker_lost",)]


@pytest.mark.long
async def test_an_event_loop_that_ends_with_the_answer_has_written_its_files(
    proxy: FakeProxy, record: dict[str, Any], tmp_path: Path
):
    proxy.script = parse_replay(IDLE)
    done = await outside(record, override_api_key=proxy.session("any"), override_base_url=proxy.base_url)
    said, complaints = await done.communicate()
    assert said.startswith(b"(0.0, "), complaints
    (result,) = (tmp_path / "logs").glob("*/*/result.json")
    assert json.loads(result.read_text())["reward"] == 0.0
    assert [path.name for path in result.parent.iterdir() if path.name.startswith(".")] == []


@pytest.mark.long
async def test_a_rollout_key_tells_calls_apart_that_share_any_key(
    proxy: FakeProxy, record: dict[str, Any], query: Any
):
    proxy.script = parse_replay(IDLE)
    asked = {**record, "override_api_key": proxy.session("any"), "override_base_url": proxy.base_url}
    names = ["a", "b", "a"]
    answers = [await run_agent_return_reward({**asked, "rollout_key": name}) for name in names]
    assert [reward for reward, _ in answers] == [0.0, 0.0, 0.0]
    assert query("select count(*) from rollouts") == [(2,)]
    assert query("select count(*) from deliveries") == [(3,)]


class Copied:
    """Knows in which thread it was copied."""

    threads: list[int] = []  # noqa: RUF012

    def __deepcopy__(self, _memo: Any) -> Self:
        self.threads.append(threading.get_ident())
        return self


async def test_a_record_is_copied_beside_the_event_loop(own: RolloutWorkflow, record: dict[str, Any]):
    with pytest.raises(RolloutDropped):
        await own.run(
            {**record, "repo_path": "/nowhere", "extra": Copied()}, base_url="http://127.0.0.1:9", api_key="k"
        )
    assert Copied.threads
    assert threading.get_ident() not in Copied.threads
    await entry.close()


@pytest.mark.parametrize(
    "data", [None, [], "text", 5, {"econfig": "[" * 100_000}, {"econfig": {"timeout": "nan"}}]
)
async def test_what_is_no_record_is_dropped_and_counted(own: RolloutWorkflow, data: Any):
    with pytest.raises(RolloutDropped):
        await own.run(data, base_url="http://127.0.0.1:9", api_key="k")
    assert await run_agent_return_reward(data) == (None, {})
    await entry.close()


@pytest.mark.parametrize("nothing", [None, ""])
def test_what_a_records_econfig_leaves_empty_is_not_given(nothing: str | None):
    own = RolloutWorkflow({"agent_config": "mine", "step_limit": 7, "timeout": 60.0})
    econfig = dict.fromkeys(("agent_config", "step_limit", "timeout", "llm_model"), nothing)
    record, call = own._asked({"econfig": econfig}, {"api_key": "k"})
    assert (call.config, call.timeout_s, dict(call.arguments)) == ("mine", 60.0, {"agent.step_limit": 7})
    assert record == {"econfig": own.econfig}


def test_a_program_that_cannot_be_loaded_is_an_answer_of_the_runner_too():
    code = "import sys; sys.modules['pydantic'] = None; " + CALL
    ran = subprocess.run(
        [sys.executable, "-c", code, "{}"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert ran.stdout == "(None, {})\n"
    assert "the program cannot be loaded" in ran.stderr
