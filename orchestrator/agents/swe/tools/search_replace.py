"""The `search_replace` tool: replace a piece of a file and leave everything else of it as it was."""

from __future__ import annotations

import asyncio
import difflib
from typing import Annotated

from pydantic import Field

from orchestrator.agents.swe.tools import files
from orchestrator.agents.swe.tools.base import Arguments, Tool, ToolContext, ToolError, ToolResult

_SEARCHED_LINES = 20_000
_SHOWN_LINE = 200


class SearchReplaceArguments(Arguments):
    """Arguments of `search_replace`."""

    path: Annotated[str, Field(description="The file: an absolute path, or one relative to the repository.")]
    old_str: Annotated[
        str, Field(description="The exact text to replace, with its indentation; enough of it to be unique.")
    ]
    new_str: Annotated[str, Field(description="The text to put in its place; may be empty.")]
    expected_count: Annotated[int, Field(ge=1, description="How often old_str must occur.")] = 1


async def _run(arguments: SearchReplaceArguments, context: ToolContext) -> ToolResult:
    """Edit the file, or say why it was left alone."""
    if not arguments.old_str:
        raise ToolError("old_str is empty. Give the text to replace; use bash to write a new file.")
    if arguments.old_str == arguments.new_str:
        raise ToolError("old_str and new_str are equal, so there is nothing to change.")
    place, text = await files.read_text(context.sandbox, arguments.path)
    old, new = _with_line_ends_of(text, arguments.old_str, arguments.new_str)
    count = text.count(old)
    if count == 0:
        nearest = await asyncio.to_thread(_nearest, text, arguments.old_str)
        raise ToolError(f"old_str was not found in {arguments.path}. {nearest} Nothing was changed.")
    lines = _line_numbers(text, old)
    if count != arguments.expected_count:
        raise ToolError(
            f"old_str occurs {count} times in {arguments.path}, expected {arguments.expected_count}: "
            f"{_listed(lines)}. Give more surrounding text or set expected_count. Nothing was changed."
        )
    await files.write_text(context.sandbox, place, _keep_final_newline(text, text.replace(old, new)))
    return ToolResult(text=f"Replaced {count} in {arguments.path}, {_listed(lines)}.")


SEARCH_REPLACE = Tool(
    name="search_replace",
    description=(
        "Replace an exact piece of text in a file of the repository. Nothing is changed unless old_str occurs "
        "exactly expected_count times; then every occurrence is replaced."
    ),
    arguments=SearchReplaceArguments,
    run=_run,
)
"""Replaces exact text; keeps line ends, byte order mark, final-newline state and mode of the file."""


def _with_line_ends_of(text: str, old: str, new: str) -> tuple[str, str]:
    """Return both strings with CRLF when the file uses it, or when only so `old` can be found."""
    crlf = text.count("\r\n")
    if not crlf:
        return old, new
    converted = _to_crlf(old), _to_crlf(new)
    if crlf == text.count("\n") or old not in text:
        return converted
    return old, new


def _to_crlf(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\n", "\r\n")


def _keep_final_newline(before: str, after: str) -> str:
    """Return `after` with a final line end if and only if `before` had one; an emptied file stays empty."""
    if not after or not before:
        return after
    ending = "\r\n" if "\r\n" in before and before.count("\r\n") == before.count("\n") else "\n"
    if before.endswith("\n") and not after.endswith("\n"):
        return after + ending
    if not before.endswith("\n") and after.endswith("\n"):
        return after.removesuffix("\n").removesuffix("\r")
    return after


def _line_numbers(text: str, old: str) -> list[int]:
    """Return the line on which each occurrence begins, counted from 1."""
    numbers, line, seen, at = [], 1, 0, text.find(old)
    while at != -1:
        line += text.count("\n", seen, at)
        numbers.append(line)
        seen, at = at, text.find(old, at + len(old))
    return numbers


def _listed(lines: list[int]) -> str:
    shown = ", ".join(str(number) for number in lines[:20])
    more = f" and {len(lines) - 20} more" if len(lines) > 20 else ""
    return f"line{'s' if len(lines) > 1 else ''} {shown}{more}"


def _nearest(text: str, old: str) -> str:
    """Say which line of the file looks most like the first line of the wanted text that is not blank."""
    wanted = next((line.strip() for line in old.splitlines() if line.strip()), "")
    lines = text.splitlines()[:_SEARCHED_LINES]
    stripped = [line.strip()[:_SHOWN_LINE] for line in lines]
    near = difflib.get_close_matches(wanted[:_SHOWN_LINE], set(stripped) - {""}, n=1, cutoff=0.5)
    if not near:
        return "No line of the file looks like it; look at the file again."
    number = stripped.index(near[0])
    said = "The same words stand" if near[0] == wanted[:_SHOWN_LINE] else "The nearest is"
    return f"{said} on line {number + 1}: {files.printable(lines[number][:_SHOWN_LINE])!r}."
