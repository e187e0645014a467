"""The scripted model: plays turns by counting, commits the faults it is told to, and watches its clients."""

from __future__ import annotations

import asyncio
import textwrap
from typing import Any

import httpx
import pytest

from orchestrator import errors
from orchestrator.testing.model_server import ScriptedModel
from orchestrator.testing.replay import load_replay, parse_replay

SCRIPT = {
    "repo__one-1": [
        {
            "name": "first",
            "turns": [{"content": "a", "tool_calls": [{"name": "bash", "arguments": {"command": "x"}}]}],
        },
        {"name": "second", "turns": [{"content": "b"}]},
    ],
    "odd id/slash": [{"name": "only", "turns": [{"content": "odd"}]}],
}


@pytest.fixture
async def server():
    async with ScriptedModel(parse_replay(SCRIPT)) as running:
        yield running


@pytest.fixture
async def client():
    async with httpx.AsyncClient(trust_env=False) as opened:
        yield opened


START = [{"role": "user", "content": "go"}]


async def ask(client: httpx.AsyncClient, base_url: str, messages: list[dict[str, Any]]) -> httpx.Response:
    return await client.post(f"{base_url}/chat/completions", json={"model": "m", "messages": messages})


def message_of(response: httpx.Response) -> dict[str, Any]:
    message = response.json()["choices"][0]["message"]
    return {key: value for key, value in message.items() if value is not None}


async def test_the_turn_is_the_number_of_assistant_messages(server, client):
    url = server.base_url("repo__one-1")
    first = message_of(await ask(client, url, START))
    assert first["tool_calls"][0]["function"] == {"name": "bash", "arguments": '{"command": "x"}'}
    told = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "done"}
    second = await ask(client, url, [*START, first, told])
    assert second.json()["choices"][0]["finish_reason"] == "stop"
    assert "tool_calls" not in message_of(second)
    assert server.violations == []


async def test_samples_play_the_scenarios_in_turn(server, client):
    said = [
        message_of(await ask(client, server.base_url("repo__one-1", k), START))["content"] for k in range(4)
    ]
    assert said == ["a", "b", "a", "b"]


async def test_a_restarted_server_goes_on_where_the_client_is(client):
    script = parse_replay({"i": [{"name": "n", "turns": [{"content": "one"}, {"content": "two"}]}]})
    async with ScriptedModel(script) as before:
        first = message_of(await ask(client, before.base_url("i"), START))
    async with ScriptedModel(script) as after:
        second = message_of(
            await ask(client, after.base_url("i"), [*START, first, {"role": "user", "content": "and"}])
        )
    assert second["content"] == "two"
    assert after.violations == []


async def test_an_instance_id_may_hold_anything(server, client):
    assert message_of(await ask(client, server.base_url("odd id/slash"), START))["content"] == "odd"


async def test_a_star_serves_every_other_instance(client):
    script = parse_replay({"*": [{"name": "n", "turns": [{"content": "any"}]}]})
    async with ScriptedModel(script) as server:
        assert message_of(await ask(client, server.base_url("whatever"), START))["content"] == "any"


async def test_models_are_listed_and_unknown_instances_are_named(server, client):
    models = await client.get(f"{server.base_url('repo__one-1')}/models")
    assert models.json()["data"][0]["id"] == "replay"
    unknown = await ask(client, server.base_url("nobody"), START)
    assert unknown.status_code == 404
    assert "repo__one-1" in unknown.json()["error"]["message"]


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([*START, "assistant"], "not answered"),
        ([*START, "assistant", {"role": "user", "content": "?"}], "before 1 tool calls are answered"),
        ([*START, {"role": "tool", "tool_call_id": "call_0_0", "content": ""}], "answers no open tool call"),
        ([*START, {"role": "assistant", "content": "a", "audio": None}], "null fields"),
    ],
    ids=["unanswered", "interrupted", "an answer to nothing", "nulls"],
)
async def test_a_history_that_endpoints_refuse_is_refused_and_counted(server, client, messages, said):
    url = server.base_url("repo__one-1")
    first = message_of(await ask(client, url, START))
    response = await ask(client, url, [first if message == "assistant" else message for message in messages])
    assert response.status_code == 400
    assert any(said in violation for violation in server.violations)


async def test_a_changed_echo_and_a_changed_prefix_are_counted(server, client):
    url = server.base_url("repo__one-1", 1)
    said = message_of(await ask(client, url, START))
    await ask(client, url, [*START, {**said, "content": "b "}, {"role": "user", "content": "?"}])
    assert "came back changed" in server.violations[0]
    await ask(client, url, [{"role": "user", "content": "go!"}, said, {"role": "user", "content": "?"}])
    assert "not those of an earlier request" in server.violations[1]


async def test_a_repeated_request_is_counted(server, client):
    url = server.base_url("repo__one-1", 1)
    said = message_of(await ask(client, url, START))
    for _ in range(2):
        await ask(client, url, [*START, said, {"role": "user", "content": "?"}])
    assert server.repeats == 1


async def test_faults_strike_as_often_as_told(client):
    fault = {"status": 503, "body": "busy", "headers": {"Retry-After": "1"}, "times": 2}
    script = parse_replay({"i": [{"name": "n", "turns": [{"content": "ok", "fault": fault}]}]})
    async with ScriptedModel(script) as server:
        answers = [await ask(client, server.base_url("i"), START) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [503, 503, 200]
    assert (answers[0].text, answers[0].headers["retry-after"]) == ("busy", "1")


async def test_a_dropped_connection_has_no_answer(client):
    script = parse_replay({"i": [{"name": "n", "turns": [{"fault": {"drop": True}}]}]})
    async with ScriptedModel(script) as server:
        with pytest.raises(httpx.RemoteProtocolError):
            await ask(client, server.base_url("i"), START)


async def test_sixty_four_clients_are_served_at_once(client):
    script = parse_replay({"i": [{"name": "n", "turns": [{"content": "ok", "fault": {"delay_s": 0.2}}]}]})
    limits = httpx.Limits(max_connections=64)
    async with ScriptedModel(script) as server, httpx.AsyncClient(trust_env=False, limits=limits) as many:
        answers = await asyncio.gather(*(ask(many, server.base_url("i", k), START) for k in range(64)))
    assert [answer.status_code for answer in answers] == [200] * 64


async def test_closing_ends_requests_that_still_wait(client):
    script = parse_replay({"i": [{"name": "n", "turns": [{"fault": {"delay_s": 600}}]}]})
    async with ScriptedModel(script) as server:
        waiting = asyncio.ensure_future(ask(client, server.base_url("i"), START))
        await server.wait_for(lambda s: len(s.requests) == 1)
    with pytest.raises(httpx.HTTPError):
        await waiting


@pytest.mark.parametrize(
    "raw", [b"nonsense\r\n\r\n", b"GET", b"POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n", b""]
)
async def test_what_is_not_http_is_hung_up_on_and_the_server_lives(server, client, raw):
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(raw)
    writer.write_eof()
    assert await reader.read() == b""
    writer.close()
    await writer.wait_closed()
    assert (await ask(client, server.base_url("repo__one-1"), START)).status_code == 200


def test_a_replay_file_is_read(tmp_path):
    path = tmp_path / "replay.yaml"
    path.write_text(
        textwrap.dedent("""
        some__task-1:
          - name: solves
            turns:
              - content: look
                tool_calls: [{name: bash, arguments: {command: ls}}]
              - tool_calls: [{name: submit}]
        """)
    )
    scenario = load_replay(path).scenario("some__task-1", 7)
    assert scenario is not None
    assert scenario.name == "solves"
    assert [turn.tool_calls[0].name for turn in scenario.turns] == ["bash", "submit"]
    assert load_replay(path).scenario("other", 0) is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [", "not valid YAML"),
        ("- a", "valid dictionary"),
        ("a: []", "no scenario is given"),
        ("a: [{name: x}]", "a[0].turns: Field required"),
        ("a: [{name: x, turns: [{tool_cals: []}]}]", "did you mean 'tool_calls'"),
        ("a: [{name: x, turns: [{fault: {status: 1000}}]}]", "a[0].turns[0].fault.status"),
        ("", "valid dictionary"),
    ],
)
def test_a_broken_replay_file_says_where(tmp_path, text, said):
    path = tmp_path / "replay.yaml"
    path.write_text(text)
    with pytest.raises(errors.ConfigError) as caught:
        load_replay(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_missing_replay_file_is_named(tmp_path):
    with pytest.raises(errors.ConfigError, match="nowhere.yaml"):
        load_replay(tmp_path / "nowhere.yaml")
