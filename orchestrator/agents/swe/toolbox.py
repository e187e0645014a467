"""Answers tool calls: every one, whatever is wrong with it, because endpoints refuse a history with a gap."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from orchestrator.agents.swe import reply
from orchestrator.agents.swe.tools.base import Arguments, ToolError, ToolResult, schema
from orchestrator.agents.swe.tools.bash import BASH
from orchestrator.agents.swe.tools.create import CREATE
from orchestrator.agents.swe.tools.search_replace import SEARCH_REPLACE
from orchestrator.agents.swe.tools.submit import SUBMIT
from orchestrator.agents.swe.tools.view import VIEW

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.agents.swe.tools.base import Tool, ToolContext

TOOLS = {tool.name: tool for tool in (BASH, SEARCH_REPLACE, VIEW, CREATE, SUBMIT)}


class FormatError(Exception):
    """A tool call that cannot be understood; its text is the model's answer."""


class Toolbox:
    """The tools of one run."""

    def __init__(self, names: Sequence[str], max_completion_tokens: int) -> None:
        self.tools = {name: TOOLS[name] for name in names}
        self.max_completion_tokens = max_completion_tokens

    def schemas(self) -> list[dict[str, Any]]:
        """Return the `tools` field of a chat request."""
        return [schema(tool) for tool in self.tools.values()]

    def understand(self, call: reply.ToolCall, *, cut: bool) -> tuple[Tool, Arguments]:
        """Return the tool and its checked arguments; raises `FormatError`.

        `cut` says that the answer ended at the completion limit, which is what half a JSON text then comes from.
        """
        tool = self.tools.get(call.name)
        if tool is None:
            raise FormatError(
                f"There is no tool called {call.name!r}. The tools are: {', '.join(self.tools)}."
            )
        try:
            given = call.arguments if isinstance(call.arguments, dict) else json.loads(call.arguments or "{}")
        except ValueError as error:
            raise FormatError(self._not_json(call.name, error, cut=cut)) from None
        if not isinstance(given, dict):
            raise FormatError(f"The arguments of {call.name} must be a JSON object. Nothing was run.")
        if any(reply.well_formed(value) != value for value in given.values() if isinstance(value, str)):
            raise FormatError(f"The arguments of {call.name} are not valid Unicode. Nothing was run.")
        try:
            return tool, tool.arguments.model_validate(given)
        except ValidationError as error:
            raise FormatError(
                f"Wrong arguments for {call.name}: {_listed(error)}. Nothing was run."
            ) from None

    def _not_json(self, name: str, error: ValueError, *, cut: bool) -> str:
        if cut:
            return (
                f"Your answer reached the limit of {self.max_completion_tokens} tokens in the middle of this call, "
                f"so the arguments of {name} are incomplete. Nothing was run. Answer more briefly, "
                "or do the work in several smaller calls."
            )
        return f"The arguments of {name} are not valid JSON ({error}). Nothing was run."


async def use(tool: Tool, arguments: Arguments, context: ToolContext) -> ToolResult:
    """Run one understood call; what the tool cannot do becomes its answer."""
    try:
        return await tool.run(arguments, context)
    except ToolError as error:
        return ToolResult(text=f"error: {error}")


def _listed(error: ValidationError) -> str:
    """Say what is wrong with each argument, without repeating its value."""
    return "; ".join(
        f"{'.'.join(str(part) for part in problem['loc'])}: {problem['msg'].lower()}"
        for problem in error.errors(include_url=False, include_input=False, include_context=False)
    )
