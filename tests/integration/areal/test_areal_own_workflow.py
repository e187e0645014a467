"""Our own workflow class, and what a call leaves behind for researchers: ids, deliveries, statistics, files."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator import entry
from orchestrator.areal import RolloutDropped, RolloutWorkflow
from orchestrator.testing.areal_double import Tracker, areal_modules
from orchestrator.testing.replay import parse_replay

if TYPE_CHECKING:
    from pathlib import Path

    from orchestrator.testing.areal_proxy import FakeProxy

IDLE = {"*": [{"name": "idle", "turns": [{"tool_calls": [{"name": "submit"}]}]}]}


@pytest.fixture
def own(config: str) -> RolloutWorkflow:
    return RolloutWorkflow(
        econfig={"agent_config": config, "step_limit": 7}, gen_args={"temperature": 0.5}, timeout=60
    )


def test_areal_takes_it_for_a_coroutine_function(own: RolloutWorkflow):
    assert inspect.iscoroutinefunction(own.run)


async def test_a_reward_is_a_true_float_and_the_trainers_ids_and_arguments_are_on_the_rollout(
    own: RolloutWorkflow, proxy: FakeProxy, record: dict[str, Any], query: Any
):
    context = SimpleNamespace(task_id=41, sample_idx=2, is_eval=False, version=9)
    tracker = Tracker()
    with areal_modules(context=context, tracker=tracker):
        reward = await own.run(record, base_url=proxy.base_url, api_key=proxy.session("offline__wordcount-1"))
    assert type(reward) is float
    assert reward == 1.0
    ((group, sample, version, text),) = query("select group_id, sample, policy_version, input from rollouts")
    assert (group.partition("/")[2], sample, version) == ("41", 2, "9")
    stored = json.loads(text)
    assert stored["origin"]["task_id"] == "41"
    assert stored["settings"]["agent"]["step_limit"] == 7
    assert stored["settings"]["agent"]["temperature"] == 0.5
    assert stored["settings"]["limits"]["deadline_s"] == pytest.approx(58.2)
    published = {name: value for scope, name, value in tracker.scalars if scope == "rollout"}
    assert len(published) == len(tracker.scalars), "each number once"
    assert (published["resolved"], published["infra_drop_rate"]) == (1.0, 0.0)
    assert "reward" not in published, "AReaL's own name"
    assert all(type(value) is float for value in published.values())


async def test_without_a_reward_the_sample_is_dropped_with_the_cause_and_the_rollout(
    own: RolloutWorkflow, record: dict[str, Any], query: Any, proxy: FakeProxy
):
    tracker = Tracker()
    with areal_modules(context=SimpleNamespace(task_id=1, sample_idx=None), tracker=tracker), pytest.raises(RolloutDropped) as dropped:  # fmt: skip
        await own.run(record, base_url="http://127.0.0.1:9", api_key=proxy.session("offline__wordcount-1"))
    ((rollout_id,),) = query("select id from rollouts")
    assert rollout_id in str(dropped.value)
    assert "llm_unreachable" in str(dropped.value)
    assert ("rollout", "infra_drop_rate", 1.0) in tracker.scalars


async def test_a_tracker_that_fails_costs_its_numbers_only(
    own: RolloutWorkflow, proxy: FakeProxy, record: dict[str, Any]
):
    proxy.script = parse_replay(IDLE)
    with areal_modules(context=SimpleNamespace(task_id=1, sample_idx=0), tracker=Tracker(broken=True)):
        assert await own.run(record, base_url=proxy.base_url, api_key=proxy.session("any")) == 0.0


async def test_a_second_call_with_the_same_key_attaches_and_another_request_under_it_is_a_conflict(
    own: RolloutWorkflow, proxy: FakeProxy, record: dict[str, Any], query: Any
):
    key = proxy.session("offline__wordcount-1")
    first = asyncio.create_task(own.run(record, base_url=proxy.base_url, api_key=key))
    await proxy.wait_for(lambda p: p.sessions[key].requests >= 1)
    again = await own.run(record, base_url=proxy.base_url, api_key=key)
    assert (await first, again) == (1.0, 1.0)
    assert query("select (select count(*) from rollouts), (select count(*) from deliveries)") == [(1, 2)]
    assert query("select count(*) from sandboxes") == [(2,)]
    with pytest.raises(RolloutDropped, match="another request"):
        await own.run(record | {"problem_statement": "other"}, base_url=proxy.base_url, api_key=key)
    assert query("select count(*) from rollouts") == [(1,)]


@pytest.mark.long
async def test_of_two_calls_that_wait_for_one_rollout_a_cancelled_one_does_not_stop_it(
    own: RolloutWorkflow, proxy: FakeProxy, record: dict[str, Any], query: Any
):
    key = proxy.session("offline__wordcount-1")
    calls = [asyncio.create_task(own.run(record, base_url=proxy.base_url, api_key=key)) for _ in range(2)]
    await proxy.wait_for(lambda p: p.sessions[key].requests >= 1)
    calls[0].cancel()
    assert await calls[1] == 1.0
    with pytest.raises(asyncio.CancelledError):
        await calls[0]
    await entry.close()
    assert query("select state from rollouts") == [("released",)]
    assert sorted(query("select kind, value from deliveries_v")) == [("exception", None), ("value", 1.0)]


async def test_cancelling_is_prompt_and_the_sandbox_is_released_behind_it(
    own: RolloutWorkflow, proxy: FakeProxy, record: dict[str, Any], query: Any
):
    proxy.script = parse_replay({"*": [{"name": "slow", "turns": [{"fault": {"delay_s": 600.0}}]}]})
    key = proxy.session("any")
    call = asyncio.create_task(own.run(record, base_url=proxy.base_url, api_key=key))
    await proxy.wait_for(lambda p: p.sessions[key].requests >= 1)
    began = time.monotonic()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert time.monotonic() - began < 1.0, f"load {os.getloadavg()[0]:.1f}"
    await entry.close()
    assert query("select state, failure_class from rollouts") == [("failed", "cancelled")]
    assert query("select count(*) from sandboxes where status <> 'released'") == [(0,)]


@pytest.mark.long
async def test_a_rollout_key_tells_apart_what_a_shared_key_does_not(
    own: RolloutWorkflow,
    proxy: FakeProxy,
    record: dict[str, Any],
    query: Any,
    caplog: pytest.LogCaptureFixture,
):
    proxy.script = parse_replay(IDLE)
    shared = proxy.session("any")
    proxy.sessions["EMPTY"] = proxy.sessions[shared]
    calls = [own.run(record, base_url=proxy.base_url, api_key="EMPTY") for _ in range(3)]
    calls += [
        own.run(record | {"rollout_key": "mine"}, base_url=proxy.base_url, api_key="EMPTY") for _ in range(2)
    ]
    assert await asyncio.gather(*calls) == [0.0] * 5
    assert query("select count(*) from rollouts") == [(4,)]
    assert caplog.text.count("a key that is not their own") <= 1


@pytest.mark.long
async def test_the_files_of_an_episode_are_written_from_what_is_stored(
    own: RolloutWorkflow, proxy: FakeProxy, record: dict[str, Any], tmp_path: Path
):
    record["instance_id"] = "../../odd/name"
    assert (
        await own.run(record, base_url=proxy.base_url, api_key=proxy.session("offline__wordcount-1")) == 1.0
    )
    await entry.close()
    (result,) = (tmp_path / "logs").rglob("result.json")
    assert result.parent.parent.parent == tmp_path / "logs"
    told = json.loads(result.read_text())
    assert (told["reward"], told["stats"]["resolved"], told["state"]) == (1.0, 1, "released")
    assert {p.name for p in result.parent.iterdir()} == {
        "result.json",
        "patch.diff",
        "grade.log",
        "trajectory.jsonl",
    }
    lines = (result.parent / "trajectory.jsonl").read_text().splitlines()
    assert [json.loads(line)["role"] for line in lines[:2]] == ["system", "user"]
