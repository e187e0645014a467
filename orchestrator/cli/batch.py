"""The claim loop of `rollouts run`: so many walks at a time, until every rollout is over or the person says stop.

A rollout that fails is followed by what `Chains` names as its successor.
"""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from orchestrator import rollout
from orchestrator.cli.console import say
from orchestrator.states import FSM_VERSION, TERMINAL, State

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Mapping, Sequence

    from orchestrator.cli.chains import Chains
    from orchestrator.cli.progress import Progress
    from orchestrator.rollout import Ending, Runtime
    from store.history import Record

T = TypeVar("T")

_POLL_S = 1.0
"""How long to leave a rollout alone that somebody else holds or that is not due."""
_OFFERED = 500
"""Ids in one claim: a database takes only so many parameters."""
_REPEAT_NOTICE_S = 30.0
_AT_ONCE = 2
"""So many signals stop the batch without waiting for anything that can be waited for later."""


class Batch:
    """Walks the rollouts `ids`, of one run unless `run_id` is None, at most `concurrency` at a time."""

    def __init__(
        self,
        runtime: Runtime,
        run_id: str | None,
        ids: Sequence[str],
        *,
        concurrency: int,
        progress: Progress,
        chains: Chains,
        wait: bool = True,
    ) -> None:
        """Without `wait`, rollouts that somebody else has by then are left to them."""
        self._runtime = runtime
        self._run_id = run_id
        self._concurrency = concurrency
        self._progress = progress
        self._chains = chains
        self._waits = wait
        self.left: set[str] = set()
        """Rollouts that somebody else took up first, or that only a newer version of this program can take up."""
        self._due: dict[str, float] = dict.fromkeys(ids, 0.0)
        """Rollouts that are not over and not walked here -> when (monotonic) to try next."""
        self._walks: dict[asyncio.Task[Ending], str] = {}
        self._signals = 0
        self._wake = asyncio.Event()
        self._noticed: tuple[str, float] = ("", 0.0)

    @property
    def interrupted(self) -> bool:
        """True when a person or the system asked to stop."""
        return self._signals > 0

    async def work(self) -> None:
        """Return when every rollout is over, or after a stop signal when no walk is left.

        Raises `store.errors.StoreError` when the store fails; the walks give their attempts back first.
        """
        with self._signals_handled():
            try:
                while self._walks or (self._due and not self._signals):
                    if not self._signals:
                        await self._claim()
                    if self._walks or self._due:  # else others finished what was left
                        await self._wait()
                        await self._collect()
            finally:
                await self._cancel_walks()

    async def _claim(self) -> None:
        free = self._concurrency - len(self._walks)
        now = time.monotonic()
        offered = [i for i, due in self._due.items() if due <= now][:_OFFERED]
        if free <= 0 or not offered:
            return
        leases = await self._unless_stopped(self._runtime.store.claim(limit=free, ids=offered))
        if leases is None:
            return
        for lease in leases:
            del self._due[lease.rollout_id]
            walk = asyncio.create_task(rollout.advance(self._runtime, lease), name=f"walk-{lease.rollout_id}")
            self._walks[walk] = lease.rollout_id
        # A walk that is cancelled before its first step could not give its lease back.
        await asyncio.sleep(0)
        self._progress.walking(len(self._walks))
        if len(leases) < free:
            taken = {lease.rollout_id for lease in leases}
            await self._look_at([i for i in offered if i not in taken], now)

    async def _unless_stopped(self, write: Coroutine[Any, Any, T]) -> T | None:
        """Wait for a write, but not for ever: a second signal gives it up, and claimed leases run out by themselves."""
        writing = asyncio.create_task(write, name="write")
        try:
            while not writing.done() and self._signals < _AT_ONCE:
                woken = asyncio.create_task(self._wake.wait(), name="wake")
                await asyncio.wait({writing, woken}, return_when=asyncio.FIRST_COMPLETED)
                woken.cancel()
                self._wake.clear()
            return writing.result() if writing.done() else None
        finally:
            writing.cancel()
            if self._signals:
                self._wake.set()

    async def _look_at(self, ids: Sequence[str], now: float) -> None:
        """Find out why rollouts could not be claimed: over, not for this program, held by another one, or not due yet."""
        if not ids:
            return
        rows = await self._rows(ids)
        ended = {}
        for rollout_id in ids:
            row = rows.get(rollout_id)
            if row is None or row["state"] in TERMINAL:
                del self._due[rollout_id]
                if row is not None:
                    self._moved(rollout_id, row["state"])
                    ended[rollout_id] = row["failure_class"]
            elif row["state"] == State.GRADED and row["lease_owner"] is None:
                self._leave_to_clean(rollout_id)
            elif row["fsm_version"] > FSM_VERSION:
                self._leave(rollout_id, "a newer version of this program submitted it: continue it with that")
            elif row["lease_owner"] is not None and not self._waits:
                self._leave(rollout_id, f"worker {row['lease_owner']} took it up first")
            else:
                self._due[rollout_id] = now + _POLL_S
        await self._follow(ended)
        waiting = [i for i in ids if i in self._due]
        if waiting and not self._walks:
            row = await self._runtime.store.history.rollout(waiting[0])
            if row is not None:
                self._notice(row, len(waiting), now)

    async def _rows(self, ids: Sequence[str]) -> dict[str, Record]:
        history = self._runtime.store.history
        if self._run_id is not None:
            return {row["id"]: row for row in await history.overview(run_id=self._run_id)}
        return {row["id"]: row for i in ids if (row := await history.rollout(i)) is not None}

    def _notice(self, row: Record, count: int, now: float) -> None:
        """Say what the run waits for, once and then now and again."""
        what = "1 rollout" if count == 1 else f"{count} rollouts"
        if row["lease_owner"] is None:
            key, why = "due", "to become due for a new attempt"
        else:
            left_s = max(0, round(row["lease_until"] / 1000 - time.time()))
            key = row["lease_owner"]
            why = f"held by worker {key}; taken over when its lease runs out, in {left_s} s unless it is renewed"
        said, at = self._noticed
        if said != key or now - at >= _REPEAT_NOTICE_S:
            self._noticed = (key, now)
            say(f"waiting for {what} {why} (first: {row['id']})")

    async def _wait(self) -> None:
        """Sleep until a walk ends, a signal comes, or something is due."""
        timeout = None
        if self._due and not self._signals and len(self._walks) < self._concurrency:
            timeout = max(0.01, min(self._due.values()) - time.monotonic())
        woken = asyncio.create_task(self._wake.wait(), name="wake")
        try:
            await asyncio.wait({*self._walks, woken}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            woken.cancel()
        self._wake.clear()

    async def _collect(self) -> None:
        ended = {}
        for walk in [w for w in self._walks if w.done()]:
            rollout_id = self._walks.pop(walk)
            if walk.cancelled():
                continue
            ending = walk.result()
            if ending.state is State.GRADED and ending.again_in_s is not None:
                self._leave_to_clean(rollout_id)
            elif ending.state not in TERMINAL:
                self._due[rollout_id] = time.monotonic() + (ending.again_in_s or _POLL_S)
            else:
                ended[rollout_id] = ending.failure_class
            self._moved(rollout_id, ending.state)
        self._progress.walking(len(self._walks))
        await self._follow(ended)

    def _leave(self, rollout_id: str, why: str) -> None:
        del self._due[rollout_id]
        self.left.add(rollout_id)
        say(f"left: {rollout_id}: {why}")

    def _leave_to_clean(self, rollout_id: str) -> None:
        """Count a rollout as answered whose reward is recorded; its sandbox is released when its provider answers."""
        self._due.pop(rollout_id, None)
        say(
            f"rollout {rollout_id}: its reward is recorded, its sandbox is not proven gone: run `rollouts clean`"
        )

    async def _follow(self, ended: Mapping[str, str | None]) -> None:
        """Submit the successors of rollouts that are over, as id -> failure class.

        While the batch is being stopped too: a stored successor is what the same command continues with.
        """
        asked = [self._chains.successor(rollout_id, why) for rollout_id, why in ended.items()]
        requests = [request for request in asked if request is not None]
        if not requests:
            return
        ids = await self._unless_stopped(self._chains.submit(self._runtime, requests))
        for rollout_id, request in zip(ids or [], requests, strict=False):
            self._due[rollout_id] = 0.0
            self._moved(rollout_id, State.CREATED)
            say(f"retry {request.retry_no} of {request.parent_id}: {rollout_id}")

    def _moved(self, rollout_id: str, state: str) -> None:
        self._progress.moved(self._chains.counted_as(rollout_id), state)

    async def _cancel_walks(self) -> None:
        for walk in self._walks:
            walk.cancel()
        if self._walks:
            await asyncio.wait(self._walks)

    def _stop(self) -> None:
        """Handle a signal: the first one lets running walks finish, the second cancels them."""
        self._signals += 1
        self._wake.set()
        if self._signals == 1:
            say(f"draining {len(self._walks)} (no new ones are started); press again to stop")
        elif self._signals == 2:
            say(f"stopping {len(self._walks)}")
            for walk in self._walks:
                walk.cancel()

    @contextmanager
    def _signals_handled(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        handled = (signal.SIGINT, signal.SIGTERM)
        for number in handled:
            loop.add_signal_handler(number, self._stop)
        try:
            yield
        finally:
            for number in handled:
                loop.remove_signal_handler(number)
