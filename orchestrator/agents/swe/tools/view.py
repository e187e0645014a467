"""The optional `view` tool: a text file with line numbers."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from orchestrator.agents.swe import observation
from orchestrator.agents.swe.tools import files
from orchestrator.agents.swe.tools.base import Arguments, Tool, ToolContext, ToolError, ToolResult


class ViewArguments(Arguments):
    """Arguments of `view`."""

    path: Annotated[str, Field(description="The file: an absolute path, or one relative to the repository.")]
    first_line: Annotated[int, Field(ge=1, description="First line to show.")] = 1
    last_line: Annotated[int | None, Field(ge=1, description="Last line to show; default: the end.")] = None


async def _run(arguments: ViewArguments, context: ToolContext) -> ToolResult:
    """Show the lines asked for, within the observation limit."""
    _, text = await files.read_text(context.sandbox, arguments.path)
    lines = files.printable(text).split("\n")
    if lines[-1] == "":
        lines.pop()
    if not lines:
        return ToolResult(text=f"{arguments.path} is empty.")
    last = min(arguments.last_line or len(lines), len(lines))
    if arguments.first_line > last:
        raise ToolError(f"{arguments.path} has {len(lines)} lines; there is nothing to show in that range.")
    numbered = "\n".join(
        f"{number:6d}  {line.rstrip(chr(13))}"
        for number, line in enumerate(lines[arguments.first_line - 1 : last], arguments.first_line)
    )
    shown, truncated = observation.truncate(numbered, context.settings.observation_limit)
    return ToolResult(text=shown, truncated=truncated)


VIEW = Tool(
    name="view",
    description="Show a text file of the repository, or a range of its lines, with line numbers.",
    arguments=ViewArguments,
    run=_run,
)
"""Shows a file."""
