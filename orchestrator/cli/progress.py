"""How far a run is, on standard error: one live line on a terminal, else a plain line now and then."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Self

from orchestrator.cli.console import say
from orchestrator.states import TERMINAL, State

if TYPE_CHECKING:
    from collections.abc import Mapping

_PLAIN_EVERY_S = 30.0


class Progress:
    """Counts rollouts by state. Use as an async context."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._states: dict[str, str] = {}
        self._walking = 0
        self._started = time.monotonic()
        self._ticker: asyncio.Task[None] | None = None
        self._bar: Any = None
        self._task: Any = None

    def know(self, states: Mapping[str, str]) -> None:
        """Take note of the rollouts to count: id -> state."""
        self._states = dict(states)

    def moved(self, rollout_id: str, state: State | str) -> None:
        """Take note that a rollout is in this state now."""
        if rollout_id in self._states:
            self._states[rollout_id] = str(state)
            self._refresh()

    def walking(self, count: int) -> None:
        """Take note of how many rollouts this process works on."""
        self._walking = count
        self._refresh()

    def line(self) -> str:
        """Return where the run stands, in one line."""
        counts = Counter(self._states.values())
        over = sum(counts[state] for state in TERMINAL)
        by_state = ", ".join(f"{counts[s]} {s.value}" for s in State if counts[s])
        return f"{over} of {len(self._states)} over ({self._walking} at work; {by_state})"

    def _say(self) -> None:
        say(f"run {self._run_id}: {self.line()}, {round(time.monotonic() - self._started)} s")

    async def __aenter__(self) -> Self:
        if sys.stderr.isatty():
            self._open_bar()
        else:
            self._ticker = asyncio.create_task(self._tick(), name="progress")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.wait([self._ticker])
        self._say()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_PLAIN_EVERY_S)
            self._say()

    def _open_bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        self._bar = Bar(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task("", total=len(self._states))
        self._bar.start()
        self._refresh()

    def _refresh(self) -> None:
        if self._bar is not None:
            over = sum(state in TERMINAL for state in self._states.values())
            self._bar.update(self._task, completed=over, description=self.line())
