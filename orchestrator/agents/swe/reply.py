"""One answer of a chat endpoint, read with suspicion: what a server calls a completion need not be one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.agents.base import Message


class MalformedReply(Exception):
    """The endpoint said 200 and sent something that is not a chat completion; the text says what."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """One tool call as the model wrote it; nothing about it has been checked."""

    id: str
    name: str
    arguments: str | dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """A chat completion (OpenAI `chat.completion` format)."""

    message: Message
    """The assistant message as it came, without null fields: what goes back in the next request."""
    tool_calls: list[ToolCall]
    finish_reason: str | None
    response_id: str | None
    model: str | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    @property
    def cut(self) -> bool:
        """True when the answer ended at the completion limit, perhaps in the middle of a tool call."""
        return self.finish_reason == "length"


def parse(body: bytes) -> Reply:
    """Read a response body; raises `MalformedReply`."""
    try:
        payload = json.loads(body)
    except ValueError:
        raise MalformedReply(f"not JSON: {_start(body)}") from None
    if not isinstance(payload, dict):
        raise MalformedReply(f"not a JSON object: {_start(body)}")
    choices = payload.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise MalformedReply(f"no choices: {_start(body)}")
    message = choices[0].get("message")
    if not isinstance(message, dict):
        raise MalformedReply(f"a choice without a message: {_start(body)}")
    message = {key: _without_nulls(field) for key, field in message.items() if field is not None}
    message.setdefault("role", "assistant")
    if message["role"] != "assistant":
        raise MalformedReply(f"a message of role {message['role']!r}: {_start(body)}")
    usage = _mapping(payload.get("usage"))
    return Reply(
        message=message,
        tool_calls=_tool_calls(message, body),
        finish_reason=_text(choices[0].get("finish_reason")),
        response_id=_text(payload.get("id")),
        model=_text(payload.get("model")),
        prompt_tokens=_count(usage.get("prompt_tokens")),
        completion_tokens=_count(usage.get("completion_tokens")),
        cached_tokens=_count(_mapping(usage.get("prompt_tokens_details")).get("cached_tokens")),
    )


def _tool_calls(message: Message, body: bytes) -> list[ToolCall]:
    calls = message.get("tool_calls", [])
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise MalformedReply(f"tool_calls is not a list of objects: {_start(body)}")
    return [_tool_call(call) for call in calls]


def _tool_call(call: dict[str, Any]) -> ToolCall:
    function = _mapping(call.get("function"))
    arguments = function.get("arguments", "")
    return ToolCall(
        id=str(call.get("id", "")),
        name=str(function.get("name", "")),
        arguments=arguments if isinstance(arguments, (str, dict)) else json.dumps(arguments),
    )


def _without_nulls(value: object) -> object:
    """Drop null fields at every depth (they make trainers refuse the echo) and repair text no encoder takes."""
    if isinstance(value, dict):
        return {key: _without_nulls(field) for key, field in value.items() if field is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if isinstance(value, str):
        return well_formed(value)
    return value


def well_formed(text: str) -> str:
    """Return text that UTF-8 can carry: lone surrogates, which JSON can hold, become U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16", errors="surrogatepass").decode("utf-16", errors="replace")


def _start(body: bytes) -> str:
    text = " ".join(body[:400].decode("utf-8", errors="replace").split())
    return text[:200] if text else "an empty body"


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
