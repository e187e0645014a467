"""AReaL's example class, its own text where that is at hand and our double of it, with our package behind it."""

from __future__ import annotations

import asyncio
import copy
import os
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from aweagent.lifecycle import run_agent_with_reward
from orchestrator import entry
from orchestrator.entry import request as entry_request
from orchestrator.testing.areal_double import SWEWorkflowDouble, areal_modules
from orchestrator.testing.replay import load_replay, parse_replay
from tests.integration.areal.conftest import EXAMPLES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from orchestrator.testing.areal_proxy import FakeProxy

ROOT = Path(__file__).resolve().parents[3]
AGENT_PY = Path(
    os.environ.get("AREAL_AGENT_PY") or ROOT.parent / "shared" / "seeds" / "002_1359c520e58a2fb9.txt"
)
SOLVED = load_replay(EXAMPLES / "replay.yaml").scenarios["offline__wordcount-1"][0]


def seed_class(folder: Path) -> Any:
    """Load AReaL's own text as it is, below a made-up checkout (its default root is three folders up)."""
    if not AGENT_PY.is_file():
        pytest.skip(
            f"AReaL's agent.py is not at {AGENT_PY}; name it in AREAL_AGENT_PY (our double of it runs)"
        )
    text = AGENT_PY.read_text(encoding="utf-8")
    module = types.ModuleType("areal_swe_agent")
    module.__file__ = str(folder / "AReaL" / "examples" / "swe" / "agent.py")
    code = text.removeprefix("agent.py\n")  # a file name above the text, no part of it
    exec(compile(code, module.__file__, "exec"), vars(module))
    return module.SWEAgentWorkflow


BOTH = ["seed", pytest.param("double", marks=[pytest.mark.long] if AGENT_PY.is_file() else [])]
"""The double stands in for the class where that is not at hand, and is compared with it in the long lane."""


@pytest.fixture(params=BOTH)
def workflow(request: pytest.FixtureRequest, tmp_path: Path, config: str) -> Iterator[Callable[..., Any]]:
    """Makes a workflow; keyword arguments go into its `econfig`."""

    def make(**econfig: Any) -> Any:
        econfig = {"agent_root": str(ROOT), "agent_config": config, "timeout": 60.0, **econfig}
        if request.param == "seed":
            return seed_class(tmp_path)(econfig=econfig)
        return SWEWorkflowDouble(run_agent_with_reward, econfig=econfig)

    with areal_modules():
        yield make


async def test_siblings_of_one_record_get_their_own_rewards_and_touch_neither_it_nor_the_environment(
    workflow: Any, proxy: FakeProxy, record: dict[str, Any], query: Any
):
    own = workflow()
    before, environment = copy.deepcopy(record), dict(os.environ)
    keys = [proxy.session("offline__wordcount-1", sample) for sample in range(3)]
    rewards = await asyncio.gather(
        *(own.run(record, base_url=proxy.base_url, api_key=key, http_client=None) for key in keys)
    )
    assert rewards == [1.0, 0.0, 0.0]
    assert (record, dict(os.environ)) == (before, environment)
    assert all(len(proxy.sessions[key].leaves()) == 1 for key in keys), (
        "a second leaf would be trained on too"
    )
    await entry.close()
    assert query("select state, count(*) from rollouts group by 1") == [("released", 3)]
    assert query("select kind, count(*) from deliveries_v group by 1") == [("value", 3)]


async def test_a_rollout_without_a_reward_is_rejected_and_never_trained_on_as_0(
    workflow: Any, proxy: FakeProxy, record: dict[str, Any], query: Any
):
    with pytest.raises(TypeError):
        await workflow().run(
            record, base_url="http://127.0.0.1:9", api_key=proxy.session("offline__wordcount-1")
        )
    assert query("select failure_class from rollouts") == [("llm_unreachable",)]
    assert query("select kind, value from deliveries") == [("none", None)]
    assert query("select dropped, usable from group_outcomes") == [(1, 0)]


@pytest.mark.parametrize(
    ("fault", "failure_class"),
    [
        ({"status": 401, "body": "{}"}, "llm_session_gone"),
        ({"status": 410, "body": "{}"}, "llm_session_gone"),
    ],
    ids=["401", "410"],
)
async def test_a_session_that_is_gone_ends_the_rollout_with_one_request(
    workflow: Any,
    record: dict[str, Any],
    proxy: FakeProxy,
    query: Any,
    fault: dict[str, Any],
    failure_class: str,
):
    proxy.script = parse_replay({"*": [{"name": "gone", "turns": [{"fault": fault}]}]})
    key = proxy.session("any")
    with pytest.raises(TypeError):
        await workflow().run(record, base_url=proxy.base_url, api_key=key)
    assert query("select failure_class from rollouts") == [(failure_class,)]
    assert proxy.sessions[key].requests == 1


@pytest.mark.long
async def test_a_prompt_that_does_not_fit_is_an_end_of_the_agent_whose_patch_counts(
    workflow: Any, record: dict[str, Any], proxy: FakeProxy, query: Any
):
    long = "x" * 60_000
    turns = [turn.model_dump(exclude_none=True) for turn in SOLVED.turns[:-1]]
    turns.append({"tool_calls": [{"name": "bash", "arguments": {"command": f"echo {long}"}}]})
    proxy.script = parse_replay({"*": [{"name": "too long", "turns": turns}]})
    proxy.max_total_tokens = 10_000
    key = proxy.session("any")
    assert await workflow().run(record, base_url=proxy.base_url, api_key=key) == 1.0
    assert query("select exit_reason from patches") == [("context_window",)]


def solved_then(**turn: Any) -> Any:
    """A model that repairs the task and then does this instead of handing it in."""
    turns = [done.model_dump(exclude_none=True) for done in SOLVED.turns[:-1]]
    return parse_replay({"*": [{"name": "late", "turns": [*turns, turn]}]})


SLEEPING = {"tool_calls": [{"name": "bash", "arguments": {"command": "sleep 600", "timeout": 600}}]}
SILENT = {"fault": {"delay_s": 600.0}}


@pytest.mark.long
async def test_the_deadline_lies_inside_the_callers_and_what_was_reached_by_then_is_graded(
    workflow: Any, record: dict[str, Any], proxy: FakeProxy, query: Any
):
    proxy.script = solved_then(**SLEEPING)
    record["econfig"] = {"timeout": 12.0}
    reward = await workflow(timeout=12.0).run(record, base_url=proxy.base_url, api_key=proxy.session("any"))
    assert reward == 1.0
    assert query("select exit_reason from patches") == [("wall_time",)]
    ((left_ms,),) = query("select deadline_at - created_at from rollouts")
    assert 0 < left_ms <= 11_000, "counted from the call"


@pytest.mark.long
async def test_a_deadline_that_cuts_an_answer_off_grades_the_patch_and_hands_over_no_reward(
    workflow: Any, record: dict[str, Any], proxy: FakeProxy, query: Any
):
    """AReaL would set the reward on the call that is still open, and skip that call."""
    proxy.script = solved_then(**SILENT)
    record["econfig"] = {"timeout": 12.0}
    with pytest.raises(TypeError):
        await workflow(timeout=12.0).run(record, base_url=proxy.base_url, api_key=proxy.session("any"))
    assert query("select outcome, reward, mask_sample, flags from grades") == [
        ("resolved", None, 1, '["llm_call_open"]')
    ]
    assert query("select invalid_reason from rewards") == [("masked:llm_call_open",)]
    assert query("select kind from deliveries") == [("none",)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("on_timeout", "reward", "masked"),
    [("zero", 0.0, 0), ("drop", None, 1)],
)
async def test_an_agent_that_ran_out_of_time_may_be_worth_0_or_nothing_instead(
    proxy: FakeProxy,
    record: dict[str, Any],
    query: Any,
    config: str,
    on_timeout: str,
    reward: float | None,
    masked: int,
):
    path = Path(config)
    path.write_text(path.read_text() + f"agent: {{timeout_s: 2}}\nlimits: {{on_timeout: {on_timeout}}}\n")

    async def run() -> Any:
        return await run_agent_with_reward(
            record, agent_type="swe", agent_config=config, result_dir="logs", override_api_key=proxy.session("any"),
            override_base_url=proxy.base_url,
        )  # fmt: skip

    proxy.script = parse_replay({"*": [{"name": "silent", "turns": [SILENT]}]})
    # an agent that never got one answer has no reward at all: it was not the agent that was slow
    assert await run() == (None, {"failure_class": "no_llm_call"})
    proxy.script = solved_then(**SLEEPING)
    handed, stats = await run()
    assert handed == reward
    assert (stats["exit_reason"], stats["mask_sample"], stats["resolved"]) == ("wall_time", masked, 0)
    assert query("select flags, sandbox_key from grades") == [(f'["on_timeout:{on_timeout}"]', None)]


@pytest.mark.long
async def test_the_callers_timeout_is_a_rejection_and_everything_is_given_back(
    workflow: Any, record: dict[str, Any], proxy: FakeProxy, query: Any
):
    proxy.script = parse_replay({"*": [{"name": "slow", "turns": [{"fault": {"delay_s": 600.0}}]}]})
    key = proxy.session("any")
    running = asyncio.create_task(workflow(timeout=6.0).run(record, base_url=proxy.base_url, api_key=key))
    await proxy.wait_for(lambda p: p.sessions[key].requests == 1)
    with pytest.raises(TimeoutError):
        await running
    await entry.close()
    assert query("select state, failure_class from rollouts") == [("failed", "cancelled")]
    assert query("select kind, exception from deliveries") == [("exception", "CancelledError")]
    assert query("select count(*) from sandboxes where status <> 'released'") == [(0,)]


async def test_another_kind_of_agent_is_never_a_silent_run_of_this_one(
    workflow: Any,
    record: dict[str, Any],
    proxy: FakeProxy,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(entry_request, "_said", set())
    own = workflow(agent_type="oh", agent_config=None, swe_agent_config="1_0_0/min-swe-agent-train-top1")
    key = proxy.session("offline__wordcount-1")
    with pytest.raises(TypeError):  # until there is such an agent
        await own.run(record, base_url=proxy.base_url, api_key=key)
    assert "eval_oh is used instead" in caplog.text
    assert proxy.sessions[key].requests == 0
