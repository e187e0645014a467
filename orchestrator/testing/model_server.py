"""A model without a model: an OpenAI-compatible HTTP endpoint on loopback that plays recorded turns.

Which turn to play is the number of assistant messages in the request, so the server needs no memory and may be
restarted at any time. What it remembers serves only to find clients that break the rules of trainers' endpoints.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote, unquote, urlsplit

from orchestrator.testing import replay
from orchestrator.testing.loopback import LoopbackServer, Request, Response

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from orchestrator.testing.replay import Scenario, Script, Turn

MODEL_NAME = "replay"


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """One chat request as it arrived."""

    instance_id: str
    sample: int
    turn: int
    payload: dict[str, Any]
    headers: dict[str, str]


class _Refusal(Exception):
    """The request is answered with an error status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class ScriptedModel:
    """Plays a script: `async with ScriptedModel(script) as server: ... server.base_url(instance_id, sample)`."""

    def __init__(self, script: Script, *, port: int = 0) -> None:
        self.script = script
        self.requests: list[Seen] = []
        """Every chat request in the order of arrival."""
        self.violations: list[str] = []
        """What clients did that a trainer's endpoint would refuse or train on wrongly."""
        self.repeats = 0
        """Requests that were equal to an earlier one: a trainer would record both."""
        self._http = LoopbackServer(self._answer, port)
        self._faults: Counter[tuple[str, int, int]] = Counter()
        self._sent: defaultdict[tuple[str, int, int], set[str]] = defaultdict(set)
        self._arrived = asyncio.Condition()

    async def __aenter__(self) -> Self:
        await self._http.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.close()

    @property
    def port(self) -> int:
        """The port it listens on."""
        return self._http.port

    def base_url(self, instance_id: str, sample: int = 0) -> str:
        """Return the base URL that plays this sample (from 0) of this instance."""
        return f"http://127.0.0.1:{self.port}/replay/{quote(instance_id, safe='')}/{sample}/v1"

    async def wait_for(self, condition: Callable[[ScriptedModel], bool]) -> None:
        """Return once the condition holds; it is looked at after every arrival."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: condition(self))

    async def _answer(self, request: Request) -> Response:
        try:
            return await self._route(request)
        except _Refusal as refusal:
            return _json(
                refusal.status, {"error": {"message": str(refusal), "type": "invalid_request_error"}}
            )

    async def _route(self, request: Request) -> Response:
        parts = urlsplit(request.path).path.strip("/").split("/")
        if parts[-2:] == ["v1", "models"] and request.method == "GET":
            return _json(200, {"object": "list", "data": [{"id": MODEL_NAME, "object": "model"}]})
        if len(parts) != 6 or parts[0] != "replay" or parts[3:] != ["v1", "chat", "completions"]:
            raise _Refusal(404, f"nothing is served at {request.path}")
        if request.method != "POST":
            raise _Refusal(405, f"{request.method} is not served here")
        instance_id, sample = unquote(parts[1]), parts[2]
        scenario = self.script.scenario(instance_id, int(sample)) if sample.isdigit() else None
        if scenario is None:
            known = ", ".join(self.script.scenarios)
            raise _Refusal(
                404, f"the replay has no turns for {instance_id!r} (sample {sample}); it has: {known}"
            )
        return await self._chat(request, instance_id, int(sample), scenario)

    async def _chat(self, request: Request, instance_id: str, sample: int, scenario: Scenario) -> Response:
        payload = _payload(request)
        messages: list[dict[str, Any]] = payload["messages"]
        turn = sum(message.get("role") == "assistant" for message in messages)
        seen = Seen(
            instance_id=instance_id, sample=sample, turn=turn, payload=payload, headers=request.headers
        )
        async with self._arrived:
            self.requests.append(seen)
            self._arrived.notify_all()
        wrong = [*_malformed(messages), *self._broken_echo(messages, scenario), *self._broken_prefix(seen)]
        self.violations.extend(f"{instance_id} sample {sample} turn {turn}: {text}" for text in wrong)
        playing = turn_of(scenario, turn)
        if playing.fault is not None and self._strikes(playing.fault, (instance_id, sample, turn)):
            response = await commit(playing.fault)
            if response is not None:
                return response
        if _malformed(messages):
            raise _Refusal(400, "; ".join(wrong))
        return _json(200, completion(playing, turn, payload))

    def _strikes(self, fault: replay.Fault, key: tuple[str, int, int]) -> bool:
        self._faults[key] += 1
        return fault.times is None or self._faults[key] <= fault.times

    def _broken_echo(self, messages: list[dict[str, Any]], scenario: Scenario) -> list[str]:
        """Compare every assistant message with what was sent: trainers match prefixes by equality."""
        said = [message for message in messages if message.get("role") == "assistant"]
        return [
            f"the answer of turn {number} came back changed"
            for number, message in enumerate(said)
            if message != without_nulls(message_of(turn_of(scenario, number), number))
        ]

    def _broken_prefix(self, seen: Seen) -> list[str]:
        """Check that the request is an earlier one plus new messages, as far as this process has seen them."""
        messages = seen.payload["messages"]
        digest = _digest(messages)
        known = self._sent[seen.instance_id, seen.sample, seen.turn]
        self.repeats += digest in known and seen.turn > 0
        known.add(digest)
        if not seen.turn:
            return []
        before = self._sent.get((seen.instance_id, seen.sample, seen.turn - 1))
        last = max(i for i, message in enumerate(messages) if message.get("role") == "assistant")
        if before and _digest(messages[:last]) not in before:
            return ["the messages before the last answer are not those of an earlier request"]
        return []


def turn_of(scenario: Scenario, number: int) -> Turn:
    """Return the turn with this number; beyond the last one the model has nothing more to say."""
    return scenario.turns[number] if number < len(scenario.turns) else replay.AFTERWARDS


def _payload(request: Request) -> dict[str, Any]:
    try:
        payload = json.loads(request.body)
    except ValueError:
        raise _Refusal(400, "the body is not JSON") from None
    messages = payload.get("messages") if isinstance(payload, dict) else None
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise _Refusal(422, "messages must be a list of objects, and not empty")
    if payload.get("stream"):
        raise _Refusal(400, "this server does not stream")
    return dict(payload)


def _malformed(messages: list[dict[str, Any]]) -> list[str]:
    """Return what an endpoint would refuse: nulls, and tool calls not answered once each, in order, at once."""
    wrong = [f"message {i} has null fields" for i, m in enumerate(messages) if without_nulls(m) != m]
    waiting: list[str] = []
    for i, message in enumerate(messages):
        if message.get("role") == "tool":
            if not waiting or message.get("tool_call_id") != waiting.pop(0):
                wrong.append(f"message {i} answers no open tool call, or not the next one")
            continue
        if waiting:
            wrong.append(f"message {i} comes before {len(waiting)} tool calls are answered")
        waiting = list(dict.fromkeys(call.get("id", "") for call in message.get("tool_calls", [])))
    if waiting:
        wrong.append(f"the last {len(waiting)} tool calls are not answered")
    return wrong


async def commit(fault: replay.Fault) -> Response | None:
    """Do what the fault says; None when it was only slow."""
    if fault.delay_s:
        await asyncio.sleep(fault.delay_s)
    if fault.drop:
        return Response(body=None)
    if fault.status is None and fault.body is None:
        return None
    return Response(
        status=fault.status or 200, body=(fault.body or "").encode("utf-8"), headers=dict(fault.headers)
    )


def message_of(turn: Turn, number: int) -> dict[str, Any]:
    """Return the assistant message as real servers send it: with nulls, and the same for the same turn."""
    calls = [
        {
            "id": f"call_{number}_{i}",
            "type": "function",
            "function": {
                "name": call.name,
                "arguments": call.arguments
                if isinstance(call.arguments, str)
                else json.dumps(call.arguments),
            },
        }
        for i, call in enumerate(turn.tool_calls)
    ]
    fields = {"refusal": None, "audio": None, "function_call": None, "tool_calls": calls or None}
    return {"role": "assistant", "content": turn.content, **fields, **turn.extra}


def completion(turn: Turn, number: int, payload: dict[str, Any]) -> dict[str, Any]:
    """Return the body of a chat completion that says this turn."""
    message = message_of(turn, number)
    prompt, said = len(json.dumps(payload["messages"])) // 4, len(json.dumps(message)) // 4
    usage = {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said}
    return {
        "id": f"chatcmpl-{_digest(payload['messages'])[:29]}",
        "object": "chat.completion",
        "created": 0,
        "model": payload.get("model", MODEL_NAME),
        "choices": [
            {
                "index": 0,
                "message": message,
                "logprobs": None,
                "finish_reason": turn.finish_reason or ("tool_calls" if turn.tool_calls else "stop"),
            }
        ],
        "usage": usage if turn.usage is None else turn.usage,
    }


def without_nulls(value: object) -> object:
    """Return the value without fields that are null, at any depth."""
    if isinstance(value, dict):
        return {key: without_nulls(field) for key, field in value.items() if field is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def _digest(messages: list[dict[str, Any]]) -> str:
    return hashlib.sha256(json.dumps(messages, sort_keys=True).encode()).hexdigest()


def _json(status: int, content: dict[str, Any]) -> Response:
    return Response(status=status, body=json.dumps(content).encode())
