"""How tool output is shown to the model: the head and the tail, never a wall of text, never an exception."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.sandbox.base import CommandResult


def truncate(text: str, limit: int, *, bytes_lost: int = 0) -> tuple[str, bool]:
    """Return `text` within `limit` characters and whether anything was left out.

    Half the limit comes from the head, half from the tail, with a line between them that counts what is missing.
    `bytes_lost` is what the sandbox itself had already dropped from the middle.
    """
    if len(text) <= limit:
        if not bytes_lost:
            return text, False
        limit = len(text)
    head, tail = text[: limit // 2], text[len(text) - limit // 2 :]
    missing = f"{len(text) - len(head) - len(tail)} characters"
    if bytes_lost:
        missing += f" and {bytes_lost} bytes"
    return f"{head}\n[... {missing} left out ...]\n{tail}", True


def show_command(result: CommandResult, limit: int, timeout_s: float) -> tuple[str, bool]:
    """Return what the model sees of a command and whether output was left out.

    The first line always says how the command ended; bytes that are not UTF-8 are shown as U+FFFD.
    """
    text = result.output.decode("utf-8", errors="replace")
    lost = result.output_bytes - len(result.output) if result.truncated else 0
    shown, truncated = truncate(text, limit, bytes_lost=lost)
    if result.timed_out:
        status = (
            f"[timed out: killed after {timeout_s:g} s with every process it started; "
            "the shell has been restarted]"
        )
    else:
        status = f"[exit code {result.exit_code}]"
    return f"{status}\n{shown or '(no output)'}", truncated
