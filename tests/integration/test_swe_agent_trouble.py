"""What the built-in agent does when the endpoint, the sandbox or the clock lets it down."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator import errors
from orchestrator.errors import ExitReason
from orchestrator.settings import AgentSettings, LlmSettings
from orchestrator.testing.loopback import LoopbackServer, Response
from orchestrator.testing.model_server import ScriptedModel
from orchestrator.testing.recorder import MemoryRecorder
from orchestrator.testing.sandbox import FakeSandbox
from orchestrator.testing.tryout import INSTANCE, TryOut, calling, script

if TYPE_CHECKING:
    from orchestrator.agents.base import AgentExit

OVERFLOW = '{"detail": "len of prompt tokens 441 exceeds max_total_tokens 200"}'


@pytest.fixture
def tryout(tmp_path):
    return TryOut(sandbox=FakeSandbox(tmp_path))


def faulty(**fault: Any) -> dict[str, Any]:
    return {"fault": fault, **calling("submit")}


async def play(tryout: TryOut, *turns: dict[str, Any]) -> tuple[AgentExit, ScriptedModel]:
    async with ScriptedModel(script(*turns)) as server:
        return await tryout.run(server.base_url(INSTANCE)), server


async def fail(
    tryout: TryOut, kind: type[errors.Failure], *turns: dict[str, Any]
) -> tuple[errors.Failure, ScriptedModel]:
    async with ScriptedModel(script(*turns)) as server:
        with pytest.raises(kind) as caught:
            await tryout.run(server.base_url(INSTANCE))
    return caught.value, server


def outcomes(tryout: TryOut) -> list[str]:
    return [call.outcome for step in tryout.recorder.steps for call in step.calls]


@pytest.mark.parametrize("status", [429, 503])
async def test_a_refusal_before_sampling_is_repeated_and_history_stays_single(tryout, status):
    over, server = await play(tryout, calling("bash", command="true"), faulty(status=status, times=3))
    assert over.reason is ExitReason.SUBMITTED
    assert outcomes(tryout) == ["ok", "refused", "refused", "refused", "ok"]
    assert tryout.pauses == [1.0, 2.0, 4.0]
    assert server.violations == []
    assert len(tryout.recorder.steps) == 2
    assert len({call.request_sha256 for call in tryout.recorder.steps[1].calls}) == 1


async def test_repeats_are_bounded_and_pauses_capped(tryout):
    tryout.llm = LlmSettings(connect_retries=4, retry_base_s=10, retry_cap_s=30)
    error, server = await fail(tryout, errors.LlmUnreachable, faulty(status=503))
    assert len(server.requests) == 5
    assert tryout.pauses == [10, 20, 30, 30]
    assert "503" in str(error)


async def test_the_server_may_ask_for_a_longer_pause(tryout):
    await play(tryout, faulty(status=429, headers={"Retry-After": "12"}, times=1))
    assert tryout.pauses == [12]


async def test_a_refused_connection_is_repeated_and_then_unreachable(tryout):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(errors.LlmUnreachable) as caught:
            await tryout.run(f"http://127.0.0.1:{port}/v1")
    assert outcomes(tryout) == ["refused"] * 6
    assert f"127.0.0.1:{port}" in str(caught.value)
    assert "'replay'" in str(caught.value)
    assert "base URL" in caught.value.hint
    assert tryout.recorder.messages == []
    assert tryout.recorder.steps[0].name == "unanswered-0001"


@pytest.mark.parametrize(
    "fault",
    [{"drop": True}, {"status": 500, "body": "ValueError: x"}, {"status": 502}, {"status": 504}],
    ids=["reset", "500", "502", "504"],
)
async def test_a_request_that_may_have_been_sampled_is_never_repeated(tryout, fault):
    _, server = await fail(tryout, errors.LlmUnreachable, calling("bash", command="true"), faulty(**fault))
    assert len(server.requests) == 2
    assert outcomes(tryout) == ["ok", "ambiguous"]
    assert [step.name for step in tryout.recorder.steps] == ["turn-0001", "unanswered-0001"]


async def test_no_answer_within_the_request_limit_is_ambiguous_and_not_repeated(tryout):
    tryout.llm = LlmSettings(request_timeout_s=0.2)
    error, server = await fail(tryout, errors.LlmUnreachable, faulty(delay_s=60))
    assert "no answer within 0.2 s" in str(error)
    assert len(server.requests) == 1
    assert outcomes(tryout) == ["ambiguous"]


@pytest.mark.parametrize("status", [401, 403, 410])
async def test_a_session_that_is_gone_ends_the_attempt_at_once(tryout, status):
    error, server = await fail(
        tryout, errors.LlmSessionGone, calling("bash", command="true"), faulty(status=status)
    )
    assert len(server.requests) == 2
    assert outcomes(tryout) == ["ok", "refused"]
    assert error.budget is None


@pytest.mark.parametrize(
    "fault",
    [
        {"status": 404, "body": '{"error": {"message": "The model does not exist"}}'},
        {"status": 400, "body": '{"error": {"message": "Unsupported parameter: tools"}}'},
        {"status": 422, "body": "{}"},
        {"body": "<html>Welcome</html>"},
        {"body": '{"choices": []}'},
        {"status": 500, "body": OVERFLOW},
    ],
    ids=["no model", "unsupported", "invalid", "a web page", "no choices", "prompt too long"],
)
async def test_an_endpoint_that_never_serves_costs_no_retry_budget(tryout, fault):
    error, server = await fail(tryout, errors.NoLlmCall, faulty(**fault))
    assert len(server.requests) == 1
    assert error.budget is None
    assert "/replay/" in str(error)
    assert error.hint
    assert len(tryout.recorder.steps) == 1


async def test_a_malformed_answer_in_the_middle_is_an_error_not_a_reward(tryout):
    await fail(
        tryout, errors.LlmUnreachable, calling("bash", command="true"), faulty(body='{"choices": [{}]}')
    )
    assert outcomes(tryout) == ["ok", "error"]
    assert "a choice without a message" in tryout.recorder.steps[1].calls[0].error


@pytest.mark.parametrize(
    "fault",
    [
        {"status": 500, "body": OVERFLOW},
        {"status": 400, "body": '{"error": {"code": "context_length_exceeded", "message": "too long"}}'},
    ],
    ids=["AReaL", "OpenAI"],
)
async def test_a_full_context_ends_the_run_as_the_agents_own_outcome(tryout, fault):
    over, server = await play(tryout, calling("bash", command="true"), faulty(**fault))
    assert over.reason is ExitReason.CONTEXT_WINDOW
    assert len(server.requests) == 2
    assert outcomes(tryout) == ["ok", "refused"]


async def test_a_model_that_hangs_until_the_time_is_up_ends_as_wall_time(tryout):
    tryout.settings = AgentSettings(tools=("bash", "submit"), timeout_s=1.0)
    over, _ = await play(tryout, calling("bash", command="true"), faulty(delay_s=60))
    assert over.reason is ExitReason.WALL_TIME
    assert outcomes(tryout) == ["ok", "ambiguous"]


async def test_a_command_is_cut_when_the_time_is_up(tryout):
    tryout.settings = AgentSettings(tools=("bash", "submit"), timeout_s=1.0)
    turn = {
        "tool_calls": [
            {"name": "bash", "arguments": {"command": "sleep 60"}},
            {"name": "bash", "arguments": {"command": "touch late"}},
        ]
    }
    began = time.monotonic()
    over, server = await play(tryout, turn)
    assert over.reason is ExitReason.WALL_TIME
    assert time.monotonic() - began < 10
    assert server.violations == []
    first, second = (m["content"] for m in tryout.recorder.messages if m["role"] == "tool")
    assert "timed out" in first
    assert second == "Not run: the time of the run is up."


async def test_wall_time_is_measured_on_the_given_clock(tryout):
    now = [0.0]

    class Ticking(MemoryRecorder):
        async def record(self, step):
            now[0] += 700

    tryout.recorder = Ticking()
    tryout.monotonic = lambda: now[0]
    over, server = await play(tryout, *[calling("bash", command="true")] * 9)
    assert over.reason is ExitReason.WALL_TIME
    assert len(server.requests) == 3


async def test_an_outage_that_lasts_to_the_end_is_not_the_agents_fault(tryout):
    tryout.settings = AgentSettings(tools=("bash", "submit"), timeout_s=5.0)
    tryout.llm = LlmSettings(retry_base_s=30, connect_retries=5)
    await fail(tryout, errors.LlmUnreachable, calling("bash", command="true"), faulty(status=503))
    assert tryout.pauses == []


async def test_no_answer_before_the_time_is_up_is_no_llm_call(tryout):
    tryout.settings = AgentSettings(tools=("bash", "submit"), timeout_s=0.5)
    error, _ = await fail(tryout, errors.NoLlmCall, faulty(delay_s=60))
    assert "without one answer" in str(error)


@pytest.mark.parametrize("url", ["", "localhost:8000/v1", "http://", "ftp://host/v1", "http://host:port/v1"])
async def test_an_address_that_is_none_is_said_so(tryout, url):
    with pytest.raises(errors.NoLlmCall, match="not the address"):
        await tryout.run(url)


async def test_a_key_with_a_line_break_is_said_so_without_the_key(tryout):
    tryout.api_key = "sk-secret\n"
    with pytest.raises(errors.NoLlmCall) as caught:
        await tryout.run("http://127.0.0.1:9/v1")
    assert "sk-secret" not in str(caught.value) + caught.value.hint


async def test_the_key_is_in_the_header_and_nowhere_else(tryout):
    tryout.api_key = "sk-planted-secret"
    echo = '{"error": {"message": "Incorrect API key provided: sk-planted-secret"}}'
    error, server = await fail(
        tryout, errors.LlmSessionGone, calling("bash", command="env"), faulty(status=401, body=echo)
    )
    assert server.requests[0].headers["authorization"] == "Bearer sk-planted-secret"
    said = f"{error} {error.hint} {tryout.recorder.steps} {[seen.payload for seen in server.requests]}"
    assert "sk-planted-secret" not in said
    assert "***" in str(error)


async def test_a_password_in_the_address_is_not_shown(tryout):
    tryout.llm = LlmSettings(connect_retries=0)
    with pytest.raises(errors.LlmUnreachable) as caught:
        await tryout.run("http://user:hidden@127.0.0.1:9/v1")
    assert "hidden" not in str(caught.value)


async def test_a_command_that_breaks_the_sandbox_is_the_agents_own_outcome(tmp_path):
    tryout = TryOut(sandbox=FakeSandbox(tmp_path, lose_at="kill everything", alive_after=True))
    turn = {
        "tool_calls": [
            {"name": "bash", "arguments": {"command": "kill everything"}},
            {"name": "bash", "arguments": {"command": "true"}},
        ]
    }
    over, _ = await play(tryout, calling("bash", command="true"), turn)
    assert over.reason is ExitReason.AGENT_DESTROYED_SANDBOX
    broke, after = (m["content"] for m in tryout.recorder.steps[1].messages if m["role"] == "tool")
    assert "broke the sandbox" in broke
    assert after == "Not run: the sandbox is gone."


async def test_a_sandbox_with_nothing_left_to_take_is_lost(tmp_path):
    tryout = TryOut(sandbox=FakeSandbox(tmp_path, lose_at="kill everything"))
    await fail(tryout, errors.SandboxLost, calling("bash", command="kill everything"))
    assert len(tryout.recorder.steps) == 1
    assert outcomes(tryout) == ["ok"]


async def test_a_sandbox_that_goes_during_an_edit_is_lost(tmp_path):
    sandbox = FakeSandbox(tmp_path, alive_after=True)
    sandbox.lost = True
    with pytest.raises(errors.SandboxLost):
        await play(TryOut(sandbox=sandbox), calling("view", path="a"))


async def test_cancelling_during_a_request_is_prompt_and_closes_the_connection(tryout):
    async with ScriptedModel(script(faulty(delay_s=60))) as server:
        running = asyncio.create_task(tryout.run(server.base_url(INSTANCE)))
        await server.wait_for(lambda s: len(s.requests) == 1)
        began = time.monotonic()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert time.monotonic() - began < 2


async def test_cancelling_during_a_command_kills_it(tryout):
    marker = Path(tryout.sandbox.workdir) / "begun"
    async with ScriptedModel(script(calling("bash", command="touch begun; sleep 60; touch late"))) as server:
        running = asyncio.create_task(tryout.run(server.base_url(INSTANCE)))
        async with asyncio.timeout(20):
            while not await asyncio.to_thread(marker.exists):
                await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert not (marker.parent / "late").exists()


async def test_each_request_has_a_connection_of_its_own(tryout):
    _, server = await play(tryout, calling("bash", command="true"), calling("submit"))
    assert {seen.headers["connection"] for seen in server.requests} == {"close"}


@pytest.mark.parametrize("slash", ["", "/"])
async def test_the_path_is_the_base_url_plus_chat_completions(tryout, slash):
    asked = []

    async def answer(request):
        asked.append((request.method, request.path))
        return Response(status=410)

    server = LoopbackServer(answer)
    await server.open()
    try:
        with pytest.raises(errors.LlmSessionGone):
            await tryout.run(f"http://127.0.0.1:{server.port}{slash}")
    finally:
        await server.close()
    assert asked == [("POST", "/chat/completions")]
