"""AReaL's calls, in this process, against real sandboxes and a scripted endpoint."""

from __future__ import annotations

import asyncio
import copy
from typing import TYPE_CHECKING, Any

import pytest

from aweagent.runner import run_agent_return_reward
from orchestrator import entry
from orchestrator.entry import request
from orchestrator.testing.model_server import ScriptedModel
from orchestrator.testing.replay import parse_replay
from tests.integration.areal.conftest import KEY

if TYPE_CHECKING:
    from pathlib import Path

    from tests.integration.areal.conftest import Caller


async def test_a_solved_task_gives_1_and_its_stats_and_neither_keeps_the_key_nor_touches_the_record(
    call: Caller, record: dict[str, Any], server: ScriptedModel, tmp_path: Path
):
    record["override_api_key"] = KEY
    before = copy.deepcopy(record)
    reward, stats = await call(record)
    assert reward == 1.0
    assert (stats["resolved"], stats["exit_reason"], stats["mask_sample"]) == (1, "submitted", 0)
    assert record == before
    assert server.violations == []
    assert server.requests[0].headers["authorization"] == f"Bearer {KEY}"
    assert call.query("select state from rollouts") == [("released",)]
    await entry.close()
    written = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert {"rollouts.db", "trajectory.jsonl", "patch.diff", "grade.log", "result.json"} <= {
        p.name for p in written
    }
    assert [p for p in written if KEY.encode() in p.read_bytes()] == []


@pytest.mark.long
async def test_the_same_key_asks_about_the_same_rollout_and_gets_the_stored_answer(
    call: Caller, record: dict[str, Any], server: ScriptedModel
):
    first = await call(record)
    asked = len(server.requests)
    assert await call(record) == first
    assert len(server.requests) == asked
    assert call.query("select count(*) from rollouts") == [(1,)]


@pytest.mark.parametrize(
    "key", ["EMPTY", pytest.param("dummy", marks=pytest.mark.long), pytest.param("", marks=pytest.mark.long)]
)
async def test_a_placeholder_key_identifies_nobody(call: Caller, record: dict[str, Any], key: str):
    idle = {"*": [{"name": "idle", "turns": [{"tool_calls": [{"name": "submit"}]}]}]}
    async with ScriptedModel(parse_replay(idle)) as other:
        call.base_url = other.base_url("any", 0)
        answers = await asyncio.gather(call(record, key), call(record, key))
    assert [reward for reward, _ in answers] == [0.0, 0.0]
    assert call.query("select count(*) from rollouts") == [(2,)]


def test_the_key_of_the_process_identifies_nobody():
    assert request.identity_of("shared", {"OPENAI_API_KEY": "shared"}) is None
    assert request.identity_of("own", {"OPENAI_API_KEY": "shared"}) is not None
    assert "own" not in str(request.identity_of("own", {}))


@pytest.mark.long
async def test_a_dead_endpoint_gives_no_reward_and_never_zero(call: Caller, record: dict[str, Any]):
    reward, stats = await call(record, override_base_url="http://127.0.0.1:9/v1")
    assert reward is None
    assert isinstance(stats, dict)
    assert call.query("select state, failure_class from rollouts") == [("failed", "llm_unreachable")]
    await entry.close()
    assert call.query("select count(*) from sandboxes where status <> 'released'") == [(0,)]


@pytest.mark.parametrize(
    "changed",
    [{"agent_type": "nobody"}, {"agent_config": "nowhere"}, {"override_base_url": "nonsense"} ],
    ids=["agent", "config", "endpoint"],
)  # fmt: skip
async def test_a_wrong_call_gives_no_reward_instead_of_an_exception(
    call: Caller, record: dict[str, Any], changed: dict[str, str]
):
    assert (await call(record, **changed))[0] is None


async def test_a_record_that_cannot_be_graded_gives_no_reward(call: Caller, record: dict[str, Any]):
    record["FAIL_TO_PASS"] = []
    assert await call(record) == (None, {})


@pytest.mark.long
async def test_cancelling_ends_the_rollout_and_goes_through(call: Caller, record: dict[str, Any]):
    waiting = {"*": [{"name": "slow", "turns": [{"fault": {"delay_s": 600.0}}]}]}
    async with ScriptedModel(parse_replay(waiting)) as slow:
        call.base_url = slow.base_url("any", 0)
        running = asyncio.create_task(call(record))
        await slow.wait_for(lambda s: len(s.requests) == 1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert call.query("select state, failure_class from rollouts") == [("failed", "cancelled")]
    await entry.close()
    assert call.query("select count(*) from sandboxes where status <> 'released'") == [(0,)]


@pytest.mark.long
async def test_the_runner_takes_its_settings_from_record_and_environment(
    call: Caller, record: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SWEAgent_CONFIG", call.config)
    monkeypatch.setenv("LOG_DIR", str(call.folder / "logs"))
    record |= {"override_api_key": KEY, "override_base_url": call.base_url}
    reward, stats = await run_agent_return_reward(record)
    assert (reward, stats["grade_outcome"]) == (1.0, "resolved")
    assert record["override_api_key"] == KEY
