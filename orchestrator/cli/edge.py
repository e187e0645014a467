"""Where the synchronous command line meets the asynchronous program and its databases."""

from __future__ import annotations

import asyncio
import signal
import threading
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

import typer

from orchestrator.cli.console import say

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine
    from typing import Any

    from store.history import History

T = TypeVar("T")

INTERRUPTED = 130
"""Exit code when a person stopped the command."""
TERMINATED = 128 + signal.SIGTERM
"""Exit code when the system stopped the command."""


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Run a command's work to its end; Ctrl-C or SIGTERM cancels it, waits for its clean-up and ends the program.

    The exit code is 130 for Ctrl-C and 143 for SIGTERM.
    """
    asked: list[int] = []
    try:
        return asyncio.run(_cancelled_by_sigterm(work, asked))
    except (KeyboardInterrupt, asyncio.CancelledError):
        say("terminated" if asked else "interrupted")
        raise typer.Exit(TERMINATED if asked else INTERRUPTED) from None


async def _cancelled_by_sigterm(work: Coroutine[Any, Any, T], asked: list[int]) -> T:
    """Cancel the work at the first SIGTERM; later ones change nothing, so that the clean-up reaches its end."""
    loop, own = asyncio.get_running_loop(), asyncio.current_task()

    def stop() -> None:
        if own is not None and not asked:
            own.cancel()
        asked.append(signal.SIGTERM)

    if threading.current_thread() is not threading.main_thread():  # signals reach nobody else
        return await work
    loop.add_signal_handler(signal.SIGTERM, stop)
    try:
        return await work
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


def database_url(argument: str | None) -> str:
    """Return the database's URL; `--db` may be a plain path."""
    from orchestrator import settings

    url = settings.database_url(argument or None)
    return url if ":" in url else f"sqlite:///{url}"


@asynccontextmanager
async def history_of(argument: str | None) -> AsyncIterator[History]:
    """Read an existing database; raises `store.errors.StoreUnusable` when there is none."""
    from store.history import History

    history = History.of(database_url(argument))
    try:
        yield history
    finally:
        await history.close()
