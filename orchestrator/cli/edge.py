"""Where the synchronous command line meets the asynchronous program and its databases."""

from __future__ import annotations

import asyncio
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
"""Exit code when a person or the system stopped the command."""


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Run a command's work to its end; Ctrl-C cancels it and ends the program with code 130."""
    try:
        return asyncio.run(work)
    except (KeyboardInterrupt, asyncio.CancelledError):
        say("interrupted")
        raise typer.Exit(INTERRUPTED) from None


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
