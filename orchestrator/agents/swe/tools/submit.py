"""The `submit` tool: the model says that it is done."""

from __future__ import annotations

from orchestrator.agents.swe.tools.base import Arguments, Tool, ToolContext, ToolResult

SUBMITTED = "Submitted: the repository as it stands now is your answer."
"""The whole answer to a `submit`; a continued run knows by it that the work is over."""


class SubmitArguments(Arguments):
    """Arguments of `submit`: none."""


async def _run(arguments: SubmitArguments, context: ToolContext) -> ToolResult:
    """Answer that the work is handed in."""
    return ToolResult(text=SUBMITTED, submitted=True)


SUBMIT = Tool(
    name="submit",
    description=(
        "Hand in the repository as it stands now. Call this once, when the work is done and checked."
    ),
    arguments=SubmitArguments,
    run=_run,
)
"""Ends the run."""
