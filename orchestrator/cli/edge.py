"""Where the synchronous command line meets the asynchronous program and its databases."""

from __future__ import annotations

import asyncio
import glob
import signal
import threading
from typing import TYPE_CHECKING, TypeVar

import typer

from orchestrator.cli.console import say

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence
    from typing import Any

    from store.history import History

T = TypeVar("T")

INTERRUPTED = 130
"""Exit code when a person stopped the command."""
TERMINATED = 128 + signal.SIGTERM
"""Exit code when the system stopped the command."""


_BESIDE = (".lock", "-wal", "-shm", "-journal")
"""What SQLite and our queue keep beside a database file; a pattern does not mean them."""


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

    return settings.database_url(argument or None)


def database_urls(arguments: Sequence[str] | None) -> list[str]:
    """Return the URLs of every database that was named, each once; a path with `*` or `?` stands for the files it fits.

    Raises `errors.UsageError` for a pattern that fits nothing.
    """
    from orchestrator import errors

    found: list[str] = []
    for argument in arguments or [""]:
        path = argument.removeprefix("sqlite:///")
        if argument and ("*" in path or "?" in path) and "://" not in path:
            files = sorted(f for f in glob.glob(path) if not f.endswith(_BESIDE))  # noqa: PTH207 - may be absolute
            if not files:
                raise errors.UsageError(
                    f"--db {argument}: no file fits", hint="quote the pattern; name a file"
                )
            found += [f"sqlite:///{file}" for file in files]
        else:
            found.append(database_url(argument))
    return list(dict.fromkeys(found))


async def of_each(
    arguments: Sequence[str] | None, ask: Callable[[History], Awaitable[T]]
) -> list[tuple[str, T]]:
    """Ask every database that was named; return (how people call it, its answer) in their order.

    Raises `store.errors.StoreUnusable` when one does not exist.
    """
    from store import engine
    from store.history import History

    answers = []
    for url in database_urls(arguments):
        history = History.of(url)
        try:
            answers.append((engine.shown(engine.parse_url(url)), await ask(history)))
        finally:
            await history.close()
    return answers


async def of_the_one_with(
    arguments: Sequence[str] | None, prefix: str, ask: Callable[[History, str], Awaitable[T]]
) -> T:
    """Ask the database that holds the one rollout whose id begins with `prefix`; raises as `holder_of` does."""
    url, rollout_id = await holder_of(database_urls(arguments), prefix)
    ((_, answer),) = await of_each([url], lambda history: ask(history, rollout_id))
    return answer


async def holder_of(urls: Sequence[str], prefix: str) -> tuple[str, str]:
    """Return the one database that holds the one rollout whose id begins with `prefix`, and the id.

    Raises `store.errors.StoreError` unless exactly one of those that can be read does.
    """
    from store import errors as store_errors

    holders: list[tuple[str, str]] = []
    refused: list[store_errors.StoreError] = []
    for url in urls:
        try:
            ((_, rollout_id),) = await of_each([url], lambda history: history.find(prefix))
            holders.append((url, rollout_id))
        except store_errors.StoreError as e:
            refused.append(e)
    if len(holders) > 1:
        raise store_errors.StoreUnusable(
            f"several databases have an id that begins with {prefix!r}", hint="give more of the id"
        )
    if not holders:
        raise refused[0]
    return holders[0]
