"""What a tool is: a name, a description, arguments as a pydantic model, and one coroutine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from orchestrator.sandbox.base import Sandbox
    from orchestrator.settings import AgentSettings


class Arguments(BaseModel):
    """Base of all tool arguments: an argument nobody declared is an error the model gets to read."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolContext:
    """What a tool may use while it runs."""

    sandbox: Sandbox
    settings: AgentSettings
    remaining_s: float
    """Until the run's wall-time limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolResult:
    """What one tool call answers, and what it counts for."""

    text: str
    timed_out: bool = False
    truncated: bool = False
    submitted: bool = False


class ToolError(Exception):
    """The call makes sense but cannot be done; its text is the model's answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
    """One tool."""

    name: str
    description: str
    arguments: type[Arguments]
    run: Callable[[Any, ToolContext], Awaitable[ToolResult]]
    """Does one call with an instance of `arguments`: answers, raises `ToolError`, or lets `errors.SandboxLost` pass."""


@cache
def schema(tool: Tool) -> dict[str, Any]:
    """Return the tool as an entry of a chat request's `tools` (OpenAI function calling format); nobody changes it."""
    parameters = tool.arguments.model_json_schema()
    parameters.pop("title", None)
    parameters.pop("description", None)
    for declared in parameters.get("properties", {}).values():
        declared.pop("title", None)
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": parameters},
    }
