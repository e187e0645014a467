"""The built-in agent against a real HTTP endpoint that plays recorded turns, in a sandbox of real processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.agents.base import AgentExit, Step
from orchestrator.agents.swe.conversation import request_digest
from orchestrator.errors import ExitReason
from orchestrator.settings import AgentSettings, ToolName
from orchestrator.testing.model_server import ScriptedModel
from orchestrator.testing.recorder import MemoryRecorder
from orchestrator.testing.sandbox import FakeSandbox
from orchestrator.testing.tryout import INSTANCE, TryOut, calling, script

TOOLS: tuple[ToolName, ...] = ("bash", "search_replace", "submit")


@pytest.fixture
def tryout(tmp_path):
    return TryOut(sandbox=FakeSandbox(tmp_path))


async def play(tryout: TryOut, *turns: dict[str, Any]) -> tuple[AgentExit, ScriptedModel]:
    """Run the agent on these turns; no run of this module may break a rule of the endpoint."""
    async with ScriptedModel(script(*turns)) as server:
        over = await tryout.run(server.base_url(INSTANCE))
    assert server.violations == []
    return over, server


def answers(step: Step) -> list[str]:
    return [message["content"] for message in step.messages if message["role"] == "tool"]


async def test_a_run_edits_the_repository_and_submits(tryout):
    work = Path(tryout.sandbox.workdir)
    (work / "a.py").write_text("x = 1\n")
    over, server = await play(
        tryout,
        {"content": "Look first.", **calling("bash", command="cat a.py")},
        calling("search_replace", path="a.py", old_str="1", new_str="2"),
        calling("submit"),
    )
    assert over.reason is ExitReason.SUBMITTED
    assert (work / "a.py").read_text() == "x = 2\n"
    assert [step.name for step in tryout.recorder.steps] == ["turn-0001", "turn-0002", "turn-0003"]
    assert len(server.requests) == 3


async def test_no_model_is_asked_while_somebody_else_may_have_the_rollout(tryout):
    doubts = [False, True, True, False]  # of the first request; the second is sent after two doubts
    asked: list[int] = []
    async with ScriptedModel(script(calling("bash", command="ls"), calling("submit"))) as server:

        def is_ours() -> bool:
            asked.append(len(server.requests))
            return not doubts.pop(0)

        tryout.is_ours = is_ours
        over = await tryout.run(server.base_url(INSTANCE))
        assert over.reason is ExitReason.SUBMITTED
        assert len(server.requests) == 2
    assert asked == [0, 1, 1, 1]
    assert len(tryout.pauses) == 2


async def test_the_transcript_is_the_last_request_plus_the_last_turn(tryout):
    _, server = await play(
        tryout,
        {"content": None, "extra": {"reasoning_content": "hm"}, **calling("bash", command="echo \xe9")},
        calling("submit"),
    )
    sent = server.requests[-1].payload["messages"]
    assert tryout.recorder.messages[: len(sent)] == sent
    assert sent[2]["reasoning_content"] == "hm"
    assert "content" not in sent[2]


async def test_steps_hold_only_new_messages_and_their_digests_form_a_chain(tryout):
    await play(tryout, calling("bash", command="true"), calling("bash", command="true"), calling("submit"))
    steps = tryout.recorder.steps
    assert [[m["role"] for m in step.messages] for step in steps] == [
        ["system", "user", "assistant", "tool"],
        ["assistant", "tool"],
        ["assistant", "tool"],
    ]
    first = request_digest("", steps[0].messages[:2])
    second = request_digest(first, steps[0].messages[2:])
    third = request_digest(second, steps[1].messages)
    assert [call.request_sha256 for step in steps for call in step.calls] == [first, second, third]


async def test_a_step_is_durable_before_the_next_request_goes_out(tryout):
    seen = []

    class Slow(MemoryRecorder):
        async def record(self, step):
            seen.append((step.name, len(server.requests)))

    tryout.recorder = Slow()
    async with ScriptedModel(script(calling("bash", command="true"), calling("submit"))) as server:
        await tryout.run(server.base_url(INSTANCE))
    assert seen == [("turn-0001", 1), ("turn-0002", 2)]


async def test_every_tool_call_is_answered_once_and_in_order(tryout):
    over, _ = await play(
        tryout,
        {
            "tool_calls": [
                {"name": "teleport", "arguments": {}},
                {"name": "bash", "arguments": "{not json"},
                {"name": "bash", "arguments": {"command": "echo ran"}},
                {"name": "bash", "arguments": {"cmd": "echo ran"}},
                {"name": "bash", "arguments": "[1]"},
            ]
        },
        calling("submit"),
    )
    assert over.reason is ExitReason.SUBMITTED
    step = tryout.recorder.steps[0]
    ids = [message["tool_call_id"] for message in step.messages if message["role"] == "tool"]
    assert ids == [f"call_0_{i}" for i in range(5)]
    unknown, broken, ran, wrong, no_object = answers(step)
    assert "no tool called 'teleport'" in unknown
    assert "bash, search_replace" in unknown
    assert "not valid JSON" in broken
    assert ran == "[exit code 0]\nran\n"
    assert "command: field required" in wrong
    assert "cmd: extra inputs" in wrong
    assert "must be a JSON object" in no_object
    assert (step.tool_calls, step.format_errors) == (5, 4)


async def test_half_a_tool_call_at_the_token_limit_says_so(tryout):
    half = {"tool_calls": [{"name": "bash", "arguments": '{"command": "echo'}], "finish_reason": "length"}
    await play(tryout, half, calling("submit"))
    assert "reached the limit of 16384 tokens" in answers(tryout.recorder.steps[0])[0]


async def test_two_calls_with_one_id_get_one_answer(tryout):
    twice = {
        "id": "same",
        "type": "function",
        "function": {"name": "bash", "arguments": '{"command": "echo a"}'},
    }
    over, _ = await play(tryout, {"extra": {"tool_calls": [twice, twice]}}, calling("submit"))
    assert over.reason is ExitReason.SUBMITTED
    (answer,) = answers(tryout.recorder.steps[0])
    assert answer.startswith("[exit code 0]\na\n")
    assert "second call with the same id was not run" in answer


async def test_calls_after_submit_are_answered_and_not_run(tryout):
    turn = {"tool_calls": [{"name": "submit"}, {"name": "bash", "arguments": {"command": "touch late"}}]}
    await play(tryout, turn)
    assert "Not run: the work was already submitted" in answers(tryout.recorder.steps[0])[1]
    assert not (Path(tryout.sandbox.workdir) / "late").exists()


async def test_silence_is_reminded_once_and_then_ends_the_run(tryout):
    over, server = await play(tryout, {"content": "Hm."}, calling("bash", command="true"), {"content": "Hm."})
    assert over.reason is ExitReason.NO_TOOL_CALL_STOP
    assert len(server.requests) == 4
    roles = [[m["role"] for m in step.messages][-2:] for step in tryout.recorder.steps]
    assert roles == [["assistant", "user"], ["assistant", "tool"], ["assistant", "user"], ["assistant"]]


async def test_unusable_turns_in_a_row_end_the_run_and_a_good_one_forgives(tryout):
    bad = {"tool_calls": [{"name": "bash", "arguments": "{"}]}
    over, server = await play(tryout, bad, bad, calling("bash", command="true"), bad, bad, bad)
    assert over.reason is ExitReason.FORMAT_ERRORS
    assert len(server.requests) == 6


async def test_an_answer_cut_before_its_tool_call_counts_as_unusable(tryout):
    cut = {"content": "I think", "finish_reason": "length"}
    over, _ = await play(tryout, cut, cut, cut)
    assert over.reason is ExitReason.FORMAT_ERRORS
    assert "limit of 16384 tokens" in tryout.recorder.steps[0].messages[-1]["content"]


async def test_commands_over_time_in_a_row_end_the_run(tryout):
    slow = calling("bash", command="echo begun; sleep 30", timeout=0.1)
    over, server = await play(tryout, slow, calling("bash", command="true"), slow, slow, slow)
    assert over.reason is ExitReason.COMMAND_TIMEOUTS
    assert len(server.requests) == 5
    assert "timed out" in answers(tryout.recorder.steps[0])[0]
    assert [step.command_timeouts for step in tryout.recorder.steps] == [1, 0, 1, 1, 1]


async def test_the_step_limit_still_runs_the_last_turn(tryout):
    tryout.settings = AgentSettings(tools=TOOLS, step_limit=2)
    over, server = await play(tryout, calling("bash", command="true"), calling("bash", command="touch done"))
    assert over.reason is ExitReason.STEP_LIMIT
    assert (Path(tryout.sandbox.workdir) / "done").exists()
    assert len(server.requests) == 2


async def test_the_token_limit_looks_at_the_last_turn(tryout):
    tryout.settings = AgentSettings(tools=TOOLS, token_limit=1000)
    small = {"usage": {"prompt_tokens": 900, "completion_tokens": 100}, **calling("bash", command="true")}
    large = {"usage": {"prompt_tokens": 901, "completion_tokens": 100}, **calling("bash", command="true")}
    over, server = await play(tryout, small, large)
    assert over.reason is ExitReason.TOKEN_LIMIT
    assert len(server.requests) == 2


async def test_long_output_and_odd_bytes_reach_the_model_cut_and_decoded(tryout):
    await play(
        tryout,
        calling("bash", command="head -c 10001 /dev/zero | tr '\\0' x"),
        calling("bash", command="printf 'a\\xff\\xfeb'"),
        calling("submit"),
    )
    long, odd, _ = [answers(step)[0] for step in tryout.recorder.steps]
    assert long == "[exit code 0]\n" + "x" * 5000 + "\n[... 1 characters left out ...]\n" + "x" * 5000
    assert odd == "[exit code 0]\na\ufffd\ufffdb"
    assert [step.truncated_observations for step in tryout.recorder.steps] == [1, 0, 0]


async def test_the_prompt_is_filled_in_once_whatever_the_report_says(tryout):
    tryout.problem_statement = "uses {workdir} and {other} and \ud800"
    tryout.settings = AgentSettings(tools=TOOLS, instance_prompt='{"in": "{workdir}"} {problem_statement}')
    _, server = await play(tryout, calling("submit"))
    prompt = server.requests[0].payload["messages"][1]["content"]
    assert prompt == f'{{"in": "{tryout.sandbox.workdir}"}} uses {{workdir}} and {{other}} and \ufffd'


async def test_the_request_names_one_token_limit_the_tools_and_nothing_unset(tryout):
    tryout.settings = AgentSettings(tools=TOOLS, temperature=0.5)
    _, server = await play(tryout, calling("submit"))
    payload = server.requests[0].payload
    assert set(payload) == {"model", "messages", "tools", "max_completion_tokens", "temperature"}
    assert [tool["function"]["name"] for tool in payload["tools"]] == list(TOOLS)
    bash = payload["tools"][0]["function"]["parameters"]
    assert bash["required"] == ["command"]
    assert bash["additionalProperties"] is False


@pytest.mark.parametrize("kept", [1, 2, 3])
async def test_a_continued_run_sends_byte_identical_messages(tryout, tmp_path, kept):
    turns = [
        {
            "content": "\xe9 \U0001f600",
            "extra": {"reasoning_content": "hm"},
            **calling("bash", command="printf '\\xff'"),
        },
        {"content": "silent"},
        calling("bash", command="echo three"),
        calling("submit"),
    ]
    _, whole = await play(tryout, *turns)
    stored = [as_stored(step) for step in tryout.recorder.steps[:kept]]
    again = TryOut(sandbox=tryout.sandbox, history=stored)
    over, continued = await play(again, *turns)
    assert over.reason is ExitReason.SUBMITTED
    assert len(continued.requests) == 4 - kept
    wire = [json.dumps(seen.payload, ensure_ascii=False) for seen in whole.requests]
    assert [json.dumps(seen.payload, ensure_ascii=False) for seen in continued.requests] == wire[kept:]
    assert [step.name for step in again.recorder.steps] == [f"turn-{n:04d}" for n in range(kept + 1, 5)]
    digests = [call.request_sha256 for step in tryout.recorder.steps for call in step.calls]
    assert [c.request_sha256 for step in again.recorder.steps for c in step.calls] == digests[kept:]


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ([calling("submit")], ExitReason.SUBMITTED),
        ([{"content": "x"}, {"content": "y"}], ExitReason.NO_TOOL_CALL_STOP),
        ([{"tool_calls": [{"name": "bash", "arguments": "{"}]}] * 3, ExitReason.FORMAT_ERRORS),
    ],
    ids=["submitted", "silent", "format errors"],
)
async def test_a_run_that_was_over_asks_nothing_more_when_continued(tryout, turns, reason):
    await play(tryout, *turns)
    again = TryOut(sandbox=tryout.sandbox, history=[as_stored(step) for step in tryout.recorder.steps])
    over, server = await play(again, *turns)
    assert over.reason is reason
    assert server.requests == []


async def test_the_time_of_an_earlier_worker_counts(tryout):
    await play(tryout, calling("bash", command="sleep 0.3"))
    used_ms = sum(
        step.tool_ms + sum(call.duration_ms for call in step.calls) for step in tryout.recorder.steps
    )
    again = TryOut(
        sandbox=tryout.sandbox,
        history=tryout.recorder.steps[:1],
        settings=AgentSettings(tools=TOOLS, timeout_s=0.3),
    )
    over, server = await play(again, calling("bash", command="true"))
    assert used_ms >= 300
    assert over.reason is ExitReason.WALL_TIME
    assert server.requests == []


def as_stored(step: Step) -> Step:
    """The step after a round trip through JSON, as a store would hand it back."""
    return Step(
        name=step.name,
        messages=json.loads(json.dumps(step.messages)),
        calls=step.calls,
        tool_calls=step.tool_calls,
        format_errors=step.format_errors,
        command_timeouts=step.command_timeouts,
        truncated_observations=step.truncated_observations,
        tool_ms=step.tool_ms,
    )
