"""What the killed processes do. Run as a program it is the server that forks them."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sqlite3
import sys
import threading
import uuid
from contextlib import closing
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import alembic.command
import psycopg
import sqlalchemy.dialects.postgresql.psycopg
import sqlalchemy.ext.asyncio

from store import dialect, engine, failpoints, rows, workers
from store.heartbeat import Heartbeat
from store.rollouts import Store
from tests.integration.durability import forking, operations

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.integration.durability.forking import Link

PRELOADED = (alembic.command, psycopg, sqlalchemy.dialects.postgresql.psycopg, sqlalchemy.ext.asyncio)
"""Modules a store loads on demand; here once, before the forks."""

WARM = workers.this_process("")
"""The server's own identity: reading the program's files for its version would take longer than a whole test case."""

SETUP_TTL_S = 3600.0


async def open_store(url: str, *, later_s: float = 0.0, clock: str | None = None, **options: Any) -> Store:
    """Open as a new worker, whose SQL clock may be ahead, or another one."""
    base = clock or dialect.Dialect.of(engine.parse_url(url)).now_sql
    now_sql = f"({base} + {round(later_s * 1000)})"
    return await Store.open(
        url,
        worker=replace(
            WARM,
            worker_id=uuid.uuid4().hex,
            pid=os.getpid(),
            pid_started=workers._started(os.getpid()),
        ),
        edges=operations.EDGES,
        new_uuid=uuid.uuid4().hex,
        now_sql=now_sql,
        **options,
    )


def exit_at(point: str) -> Callable[[str], None]:
    return lambda passed: os._exit(137) if passed == point else None


async def take(store: Store, write: str, lease: rows.Lease, state: str) -> rows.Lease:
    """Stand where a worker stands before `write`: it holds the lease and has stored something that was acknowledged."""
    if state in ("released", "failed") or write in ("claim", "register", "stop"):
        return lease
    (taken,) = await store.claim(limit=1, ids=[lease.rollout_id], ttl_s=SETUP_TTL_S)
    await store.record(taken, [rows.StepRow(name="acknowledged", output={})])
    if state == "created":
        await store.record(taken, [operations.intent(operations.box(taken))])
    if write == "transition.release":
        await operations.close_boxes(store, lease.rollout_id)
    return taken


async def failpoint_setup(link: Link, url: str, wanted: list[list[str]], twins: list[list[str]]) -> None:
    """Prepare rollouts of (id, state), and do the write of each twin (id, state, write) twice, undisturbed."""
    store = await open_store(url)
    leases = await operations.prepare(store, [(w[0], w[1]) for w in [*wanted, *twins]])
    link.say({rollout_id: asdict(lease) for rollout_id, lease in leases.items()})
    held = [await take(store, write, leases[name], state) for name, state, write in twins]
    link.say("taken")
    for _ in range(2):
        await link.listen()
        link.say(
            [
                await operations.act(store, write, lease)
                for (_, _, write), lease in zip(twins, held, strict=True)
            ]
        )
    await store.close()


async def failpoint_death(
    link: Link, url: str, write: str, point: str, lease: dict[str, Any], state: str
) -> None:
    """Die at the point, with one write on the way."""
    if write == "register":
        failpoints.install(exit_at(point))
    store = await open_store(url)
    held = await take(store, write, rows.Lease(**lease), state)
    link.say({"worker": store.worker.worker_id, "lease": asdict(held)})
    failpoints.install(exit_at(point))
    if write == "stop":
        await store.close()
    link.say({"survived": await operations.act(store, write, held)})


async def failpoint_repeat(link: Link, url: str, done: list[tuple[str, dict[str, Any]]]) -> None:
    """In a fresh process: do (write, lease) again, then claim everything once the dead workers' leases ran out."""
    store = await open_store(url)
    link.say([await operations.act(store, write, rows.Lease(**lease)) for write, lease in done])
    await link.listen()
    await store.close()
    later = await open_store(url, later_s=2 * SETUP_TTL_S)
    link.say([lease.rollout_id for lease in await later.claim(limit=10_000, ttl_s=60)])
    await later.close()


async def failpoint_raise(link: Link, url: str, cases: list[list[Any]]) -> None:
    """For each (write, point, fatal, lease, state): the point raises once, and the process lives on."""
    store = await open_store(url)
    for write, point, fatal, lease, state in cases:
        held = await take(store, write, rows.Lease(**lease), state)
        failpoints.install(raise_once(point, KeyboardInterrupt if fatal else RuntimeError))
        try:
            link.say(await operations.act(store, write, held))
        except RuntimeError as e:
            link.say(f"raised {e}")
        failpoints.install(None)
    await store.close()


def raise_once(point: str, error: type[BaseException]) -> Callable[[str], None]:
    raised: list[str] = []

    def action(passed: str) -> None:
        if passed == point and not raised:
            raised.append(passed)
            raise error(point)

    return action


async def load(link: Link, url: str, name: str, width: int, *, until_told: bool = False) -> None:
    """Run rollouts without end, `width` at a time, and acknowledge each fact after its await."""
    store = await open_store(url, ttl_s=60)
    stop = asyncio.ensure_future(link.listen()) if until_told else asyncio.get_running_loop().create_future()

    async def slot(number: int) -> None:
        turn = 0
        while not stop.done():
            await one(store, link, f"{name}-{number:03d}-{turn:04d}")
            turn += 1

    async with Heartbeat(store):
        await asyncio.gather(*(slot(number) for number in range(width)))
    await store.close()


async def one(store: Store, link: Link, rollout_id: str) -> None:
    await store.submit([operations.new_rollout(rollout_id)])
    link.say(["submit", rollout_id])
    (lease,) = await store.claim(limit=1, ids=[rollout_id])
    link.say(["claim", rollout_id, lease.fence])
    await store.record(lease, [operations.intent(operations.box(lease))])
    for version, trigger in enumerate(operations.LINE):
        if trigger == "release":
            await store.close_sandbox(operations.box(lease), "gone")
        held = operations.lease_of(rollout_id, fence=lease.fence, version=version)
        moved = await operations.move(store, held, trigger)
        assert isinstance(moved, rows.Applied | rows.AlreadyApplied), (rollout_id, trigger, moved)
        link.say(["move", rollout_id, version + 1, trigger])
        if trigger != "release":
            fact = f"{rollout_id}-{version}"
            noted = await store.record(
                lease,
                [
                    rows.StepRow(name=fact, output={}),
                    rows.LlmCallRow(kind="turn", outcome="ok", request_sha256=fact),
                ],
            )
            assert isinstance(noted, rows.Applied), (rollout_id, noted)
            link.say(["fact", rollout_id, fact])


async def hold_database(link: Link, url: str) -> None:
    """Be the program that keeps a SQLite file for itself until told otherwise."""
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)) as raw:
        raw.execute("BEGIN EXCLUSIVE")
        link.say("held")
        await link.listen()
        raw.execute("ROLLBACK")


async def note_on_demand(link: Link, url: str, rollout_id: str, ttl_s: float) -> None:
    """Claim a rollout, then store one step for each line that is heard and say what came of it."""
    store = await open_store(url, ttl_s=ttl_s)
    (lease,) = await store.claim(limit=1, ids=[rollout_id])
    said: list[str] = []
    async with Heartbeat(store) as heartbeat:
        heartbeat.hold(lease, said.append)
        link.say({"fence": lease.fence})
        while (name := await link.listen()) != "stop":
            outcome = await store.record(lease, [rows.StepRow(name=name, output={})])
            if isinstance(outcome, rows.LeaseExpired) and await store.reacquire(lease):
                outcome = await store.record(lease, [rows.StepRow(name=name, output={})])
            link.say(type(outcome).__name__)
    link.say(said)
    await store.close()


async def fork_in_batch(link: Link, url: str, rollout_id: str) -> None:
    """Fork a child while the writer is inside a batch, and wait there to be killed."""
    store = await open_store(url)
    inside = threading.Event()

    def stay(point: str) -> None:
        if point == "submit.before_commit":
            inside.set()
            threading.Event().wait()

    failpoints.install(stay)
    writing = asyncio.ensure_future(store.submit([operations.new_rollout(rollout_id)]))
    await asyncio.to_thread(inside.wait)
    child = os.fork()
    if child == 0:
        signal.pause()
    link.say({"child": child})
    await writing


SCENARIOS: dict[str, Any] = {
    f.__name__: f
    for f in (
        failpoint_setup,
        failpoint_death,
        failpoint_repeat,
        failpoint_raise,
        load,
        hold_database,
        note_on_demand,
        fork_in_batch,
    )
}

if __name__ == "__main__":
    from tests.integration.durability import driving
    from tests.integration.durability.scenarios import SCENARIOS as ALL

    ALL["drive"] = driving.drive
    forking.serve(socket.socket(fileno=int(sys.argv[1])), ALL)
