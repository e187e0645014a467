"""The processes that chaos kills: forked from one warm server, each walks whatever rollout is due until it is told to stop."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import uuid
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import alembic.command
import openai
import psycopg
import sqlalchemy.dialects.postgresql.psycopg
import sqlalchemy.ext.asyncio
from pydantic import SecretStr

from orchestrator import recovery, rollout
from orchestrator.agents import registry
from orchestrator.agents.base import Endpoint
from orchestrator.agents.swe import loop
from orchestrator.assembly import Worker
from orchestrator.testing.remote_boxes import RemoteProvider
from store import errors, failpoints, rows, workers
from store.heartbeat import Heartbeat
from store.rollouts import Store
from tests.integration.durability import forking, operations

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.integration.durability.forking import Link

PRELOADED = (
    alembic.command,
    openai,
    psycopg,
    sqlalchemy.dialects.postgresql.psycopg,
    sqlalchemy.ext.asyncio,
    registry,
    loop,
)
"""Modules that a worker loads on demand; here once, before the forks."""
WARM = workers.this_process("")
IDLE = "idle"
"""The state of a worker that holds no rollout."""
_PAUSE_S = 0.1
_PR_SET_PDEATHSIG = 1


class Workers(forking.ForkServer):
    """Starts workers with `start("work", ...)`; they die with the test process."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control = ours
        self._children: list[forking.Child] = []
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.acceptance.chaos_worker", str(theirs.fileno())],
                cwd=forking.ROOT,
                pass_fds=[theirs.fileno()],
            )


class AckingStore(Store):
    """Tells the test of every claim and every move, after the await that makes it durable."""

    say: Callable[[object], None]

    async def claim(self, **named: Any) -> list[rows.Lease]:
        taken = await super().claim(**named)
        for lease in taken:
            self.say(["claimed", lease.rollout_id, lease.fence])
        return taken

    async def transition(self, lease: rows.Lease, trigger: str, **named: Any) -> rows.Outcome:
        outcome = await super().transition(lease, trigger, **named)
        if isinstance(outcome, rows.Applied | rows.AlreadyApplied):
            self.say(["moved", lease.rollout_id, outcome.version, trigger, lease.fence])
        return outcome


class Places:
    """Where this process is: tells the test of every (failpoint, state) it passes first, and dies at the one it is given."""

    def __init__(self, link: Link, death: list[str] | None) -> None:
        self.state = IDLE
        self._link = link
        self._death = death
        self._passed: set[str] = set()
        self._lock = threading.Lock()

    def say(self, value: object) -> None:
        with self._lock:
            self._link.say(value)

    def hit(self, point: str) -> None:
        pair = [point, self.state]
        if pair == self._death:
            os._exit(137)
        name = " ".join(pair)
        if name not in self._passed:
            self._passed.add(name)
            self.say(["passed", *pair])


async def work(
    link: Link, url: str, address: str, model_url: str, death: list[str] | None, ttl_s: float
) -> None:
    """Claim and walk rollouts until the test says a word; end at once when it is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # one that stands still would outlive the test
    places = Places(link, death)
    failpoints.install(places.hit)
    stop = _told_to_stop(link)
    store = await _open(url, ttl_s)
    store.say = places.say
    places.say(["ready", store.worker.worker_id])
    provider = RemoteProvider(address)

    def endpoint_of(row: dict[str, Any], _settings: object) -> Endpoint:
        base_url = f"{model_url}/replay/{row['instance_id']}/{row['sample']}/v1"
        return Endpoint(base_url=base_url, model="replay", api_key=SecretStr("EMPTY"))

    def on_move(_rollout_id: str, state: str) -> None:
        places.state = str(state)

    async with Heartbeat(store) as heartbeat:
        runtime = Worker(store=store, heartbeat=heartbeat).runtime(provider, endpoint_of, on_move=on_move)
        await recovery.heal(runtime)
        while not stop.is_set():
            if not await _walk_one(store, runtime, places):
                places.say([IDLE])
                await recovery.heal(runtime)
                with suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), _PAUSE_S)
    await provider.close()
    # Told to stop while the server is away: the leases lapse by themselves.
    with suppress(errors.StoreUnreachable):
        await store.close()


async def _open(url: str, ttl_s: float) -> AckingStore:
    """Open the store as soon as somebody lets us in: the server may be away just now."""
    while True:
        try:
            return await AckingStore.open(
                url,
                worker=replace(
                    WARM,
                    worker_id=uuid.uuid4().hex,
                    pid=os.getpid(),
                    pid_started=workers._started(os.getpid()),
                ),
                edges=operations.EDGES,
                new_uuid=uuid.uuid4().hex,
                ttl_s=ttl_s,
            )
        except errors.NeverReached:
            await asyncio.sleep(_PAUSE_S)


async def _walk_one(store: AckingStore, runtime: rollout.Runtime, places: Places) -> bool:
    leases = await store.claim(limit=1)
    if not leases:
        return False
    places.state = leases[0].state
    ending = await rollout.advance(runtime, leases[0])
    places.state = IDLE
    places.say(["over", ending.rollout_id, ending.state.value, ending.message[:200]])
    return True


def _told_to_stop(link: Link) -> asyncio.Event:
    """Return an event that a word of the test sets; the test's death is this process's, however busy it is."""
    stop = asyncio.Event()
    running = asyncio.get_running_loop()

    def listen() -> None:
        if link.hear() is None:
            os._exit(1)
        running.call_soon_threadsafe(stop.set)

    threading.Thread(target=listen, name="listen", daemon=True).start()
    return stop


if __name__ == "__main__":
    forking.serve(socket.socket(fileno=int(sys.argv[1])), {"work": work})
