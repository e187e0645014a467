"""The `bash` tool: one command in the sandbox's persistent session."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from orchestrator.agents.swe import observation
from orchestrator.agents.swe.tools.base import Arguments, Tool, ToolContext, ToolError, ToolResult


class BashArguments(Arguments):
    """Arguments of `bash`."""

    command: Annotated[str, Field(description="The command line, or several lines, to run.")]
    timeout: Annotated[
        float | None,
        Field(gt=0, description="Seconds the command may take; more than the default if needed."),
    ] = None


async def _run(arguments: BashArguments, context: ToolContext) -> ToolResult:
    """Run the command and show how it ended."""
    if "\0" in arguments.command:
        raise ToolError("The command holds a NUL character, which no shell accepts. Nothing was run.")
    settings = context.settings
    asked_s = min(arguments.timeout or settings.command_timeout_s, settings.max_command_timeout_s)
    timeout_s = max(min(asked_s, context.remaining_s), 0.001)
    result = await context.sandbox.shell(arguments.command, timeout_s=timeout_s)
    text, truncated = observation.show_command(result, settings.observation_limit, timeout_s)
    return ToolResult(text=text, timed_out=result.timed_out, truncated=truncated)


BASH = Tool(
    name="bash",
    description=(
        "Run a command in a bash session that lasts: the working directory and variables are kept between calls. "
        "Standard input is empty, so do not start programs that wait for a person. "
        "The answer begins with the exit code; long output is shown without its middle."
    ),
    arguments=BashArguments,
    run=_run,
)
"""Runs shell commands; the longest allowed time comes from the settings, never from the model."""
