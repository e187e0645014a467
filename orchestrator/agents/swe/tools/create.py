"""The optional `create` tool: a new file."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from orchestrator.agents.swe.tools import files
from orchestrator.agents.swe.tools.base import Arguments, Tool, ToolContext, ToolError, ToolResult


class CreateArguments(Arguments):
    """Arguments of `create`."""

    path: Annotated[
        str, Field(description="The new file: an absolute path, or one relative to the repository.")
    ]
    content: Annotated[str, Field(description="The whole content.")]


async def _run(arguments: CreateArguments, context: ToolContext) -> ToolResult:
    """Write the file, or say what is in the way."""
    place = await files.locate(context.sandbox, arguments.path)
    if place.kind != "missing":
        raise ToolError(
            f"{arguments.path} exists already ({place.kind}). Use search_replace or bash to change it."
        )
    await files.write_text(context.sandbox, place, arguments.content)
    return ToolResult(text=f"Made {arguments.path} ({len(files.to_bytes(arguments.content))} bytes).")


CREATE = Tool(
    name="create",
    description="Make a new text file in the repository, with its folders. An existing file is left alone.",
    arguments=CreateArguments,
    run=_run,
)
"""Makes a file; never overwrites one."""
