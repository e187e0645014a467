"""The store against a pure model: random histories of two workers, crashes and a moving clock, on both engines.

After every step what the database holds must be what the model says, and a few laws must hold of the rows by themselves.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings, stateful
from hypothesis import strategies as st

from store import errors, leases, rows
from tests.integration.model import database
from tests.integration.model.database import CLOCK, WORKERS, Bench
from tests.integration.model.store_model import (
    EDGES,
    OPEN,
    TERMINAL,
    TTL_S,
    Model,
    Rollout,
    Write,
    check_laws,
    facts,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from store.rollouts import Store

TRIGGERS = sorted({trigger for _, trigger in EDGES})
BACKS = (
    None,
    None,
    None,
    rows.GiveBack(outcome="interrupted"),
    rows.GiveBack(outcome="failed", error_class="sandbox", error="x", delay_ms=5_000, spend="infra"),
)
pick = st.integers(0, 99)


class TwoWorkers(stateful.RuleBasedStateMachine):
    """Random operations of two workers on a few rollouts."""

    def __init__(self, bench: Bench) -> None:
        super().__init__()
        self.bench = bench
        ((now,),) = bench.ask(f"SELECT {CLOCK}")
        self.model = Model(now)
        self.run_id = bench.name("run")
        self.requests: list[rows.NewRollout] = []
        self.leases: list[tuple[int, rows.Lease]] = []
        self.writes: list[tuple[int, Write]] = []
        self.before: dict[str, tuple[Any, ...]] = {}
        bench.said["examples"] += 1

    def call(self, operation: Any) -> Any:
        async def answer() -> Any:
            try:
                return await operation
            except errors.StoreError as e:
                return type(e)

        return self.bench.run(answer())

    def store(self, worker: int) -> Store:
        return self.bench.stores[worker]

    def send(self, worker: int, w: Write) -> Any:
        store = self.store(worker)
        if w.trigger is None:
            return store.record(w.lease, w.extra, spend=w.spend, give_back=w.give_back)
        failure = ("internal", "x") if w.trigger == "fail" else None
        return store.transition(
            w.lease, w.trigger, op_id=w.op_id, extra=w.extra, cancellable=w.cancellable,
            give_back=w.give_back, failure=failure,
        )  # fmt: skip

    def agree(self, what: str, got: object, expected: object) -> None:
        self.bench.said[f"{what}: {_named(expected)}"] += 1
        assert got == expected, what

    def write(self, what: str, worker: int, w: Write) -> None:
        self.writes.append((worker, w))
        self.agree(what, self.call(self.send(worker, w)), self.model.write(w))

    def lease(self, n: int, shift: int = 0, *, newest: bool = False) -> tuple[int, rows.Lease]:
        """Return a lease that was given once, with the version that is right now plus `shift`."""
        leases = self.leases
        if newest:
            leases = list({lease.rollout_id: (worker, lease) for worker, lease in leases}.values())
            leases = [
                x for x in leases if self.model.rollouts[x[1].rollout_id].state not in TERMINAL
            ] or leases
        worker, lease = leases[n % len(leases)]
        return worker, replace(lease, version=self.model.rollouts[lease.rollout_id].version + shift)

    def box(self, rollout_id: str, status: tuple[str, ...], n: int) -> str | None:
        keys = [k for k, (_, s) in self.model.rollouts[rollout_id].boxes.items() if s in status]
        return keys[n % len(keys)] if keys else None

    @stateful.initialize(number=st.integers(1, 3))
    def begin(self, number: int) -> None:
        self.submit(number)
        self.claim(0, limit=3)

    def submit(self, number: int) -> None:
        new = [database.request(self.bench.name("rollout"), self.run_id) for _ in range(number)]
        self.agree("submit", self.call(self.store(0).submit(new)), [(row.id, True) for row in new])
        self.requests += new
        self.model.rollouts |= {row.id: Rollout() for row in new}

    @stateful.rule(worker=st.sampled_from(WORKERS), limit=st.integers(1, 3))
    def claim(self, worker: int, limit: int) -> None:
        store = self.store(worker)
        got = self.call(store.claim(limit=limit, run_id=self.run_id))
        said = [(g.rollout_id, g.fence, g.version, g.state, g.previous) for g in got]
        self.agree("claim", said, self.model.claim(store.worker.worker_id, limit))
        self.leases += [(worker, lease) for lease in got]

    @stateful.rule(
        n=pick,
        moves=st.integers(1, 8),
        cancellable=st.sampled_from((False, False, True)),
        hasty=st.booleans(),
    )
    def go_on(self, n: int, moves: int, cancellable: bool, hasty: bool) -> None:
        """Walk some way along the line, under a live lease if one can be had."""
        live = [i for i, r in self.model.rollouts.items() if r.state not in TERMINAL]
        if not live:
            self.submit(1)
        elif (self.model.rollouts[live[n % len(live)]].until or 0) < self.model.now:
            self.claim(n % 2, limit=3)
        for _ in range(moves):
            worker, lease = self.lease(n, newest=True)
            if hasty:
                self.write("hasty", worker, Write(lease, "release", self.bench.name("op")))
            self.one_move(*self.lease(n, newest=True), cancellable)

    def one_move(self, worker: int, lease: rows.Lease, cancellable: bool) -> None:
        state = self.model.rollouts[lease.rollout_id].state
        op_id = self.bench.name("op")
        if state == "created" and self.box(lease.rollout_id, ("intent",), 0) is None:
            self.write("go on", worker, Write(lease, None, extra=(database.intent(self.bench.name("box")),)))
        elif state == "graded" and (key := self.box(lease.rollout_id, OPEN, 0)) is not None:
            self.write("go on", worker, Write(lease, None, extra=(rows.SandboxReleasing(),)))
            closed = self.call(self.store(worker).close_sandbox(key, "gone"))
            assert closed == self.model.close_sandbox(self.model.rollouts[lease.rollout_id], key)
        elif line := [t for s, t in EDGES if s == state and t not in ("fail", "restart")]:
            extra = self.evidence(lease, line[0], op_id)
            self.write("go on", worker, Write(lease, line[0], op_id, extra, cancellable))

    def legal(self, lease: rows.Lease, n: int) -> str:
        """Return a trigger that leaves the state the rollout is in; any, when it is over."""
        state = self.model.rollouts[lease.rollout_id].state
        legal = [trigger for source, trigger in EDGES if source == state] or TRIGGERS
        return legal[n % len(legal)]

    def overtaken(self) -> list[tuple[int, rows.Lease]]:
        """Return the leases of rollouts that somebody else, or a later attempt, is working on."""
        live = {i: r.fence for i, r in self.model.rollouts.items() if (r.until or 0) > self.model.now}
        return [
            (worker, lease) for worker, lease in self.leases if lease.fence < live.get(lease.rollout_id, 0)
        ]

    @stateful.rule(n=pick, moves=st.booleans())
    def overtaken_worker(self, n: int, moves: bool) -> None:
        """A worker that slept through its lease writes what would be right if it still held it."""
        if not self.overtaken():
            self.time_passes(60_001)
            self.write_late("expired", self.leases[-2:], n, moves=moves)
            self.claim(n % 2, limit=3)
        self.write_late("overtaken", self.overtaken()[-3:], n, moves=moves)

    def write_late(self, what: str, late: list[tuple[int, rows.Lease]], n: int, *, moves: bool) -> None:
        for worker, given in late:
            lease = replace(given, version=self.model.rollouts[given.rollout_id].version)
            trigger, op_id = self.legal(lease, n) if moves else None, self.bench.name("op")
            self.write(what, worker, Write(lease, trigger, op_id, self.evidence(lease, trigger, op_id)))

    def evidence(self, lease: rows.Lease, trigger: str | None, name: str) -> tuple[rows.Row, ...]:
        if trigger == "provision":
            key = self.box(lease.rollout_id, ("intent",), 0)
            return (rows.SandboxLive(key=key, provider_ids=["i"], isolation="none"),) if key else ()
        if trigger == "grade":
            return database.grade(name)
        if trigger in ("restart", "fail"):
            return (rows.SandboxReleasing(),)
        return (rows.StepRow(name=name, output={}),)

    @stateful.rule(
        n=pick, shift=st.sampled_from((0, 0, 0, -2, -1, 1)), ahead=st.sampled_from((0,) * 9 + (1,)), trigger=st.sampled_from(TRIGGERS + [""] * len(TRIGGERS)),
        back=st.sampled_from(BACKS), worker=st.sampled_from(WORKERS), cancellable=st.booleans(),
    )  # fmt: skip
    def transition(
        self,
        n: int,
        shift: int,
        ahead: int,
        trigger: str,
        back: rows.GiveBack | None,
        worker: int,
        cancellable: bool,
    ) -> None:
        _, lease = self.lease(n, shift)
        lease = replace(lease, fence=lease.fence + ahead)
        trigger = trigger or self.legal(lease, n)
        op_id = self.bench.name("op")
        extra = self.evidence(lease, trigger, op_id)
        self.write("transition", worker, Write(lease, trigger, op_id, extra, cancellable, back))

    @stateful.rule(
        n=pick, k=pick, kind=st.sampled_from(("step", "intent", "live", "one releasing", "releasing")),
        back=st.sampled_from(BACKS), spend=st.sampled_from((None, None, "crash", "infra", "grade")),
    )  # fmt: skip
    def record(self, n: int, k: int, kind: str, back: rows.GiveBack | None, spend: str | None) -> None:
        worker, lease = self.lease(n)
        name = self.bench.name("box")
        some = self.box(lease.rollout_id, (*OPEN, "released"), k) or "no such box"
        extra: dict[str, rows.Row] = {
            "step": rows.StepRow(name=name, output={}),
            "intent": database.intent(name),
            "live": rows.SandboxLive(key=some, provider_ids=["i"], isolation="none"),
            "one releasing": rows.SandboxReleasing(key=some),
            "releasing": rows.SandboxReleasing(),
        }
        self.write("record", worker, Write(lease, None, "", (extra[kind],), give_back=back, spend=spend))

    @stateful.precondition(lambda self: bool(self.writes))
    @stateful.rule(n=pick, moved=st.booleans())
    def try_a_transition_again(self, n: int, moved: bool) -> None:
        """The acknowledgement was lost; maybe the caller goes through the other worker's store now."""
        again = [(worker, w) for worker, w in self.writes if w.trigger is not None]
        if again:
            worker, w = again[-1 - n % min(4, len(again))]
            self.agree("again", self.call(self.send(1 - worker if moved else worker, w)), self.model.write(w))

    @stateful.rule(n=pick, number=st.integers(2, 4))
    def burst(self, n: int, number: int) -> None:
        """Several moves of one rollout queued at once are made in their order."""
        worker, lease = self.lease(n, newest=True)
        state, made = self.model.rollouts[lease.rollout_id].state, []
        for shift in range(number):
            line = [t for s, t in EDGES if s == state and t in ("provision", "start_agent", "restart")]
            if line:
                state = EDGES[state, line[-1]]
                move = replace(lease, version=lease.version + shift)
                made.append(Write(move, line[-1], self.bench.name("op")))

        async def all_at_once() -> list[Any]:
            return await asyncio.gather(*(self.send(worker, w) for w in made), return_exceptions=True)

        got = [type(g) if isinstance(g, errors.StoreError) else g for g in self.bench.run(all_at_once())]
        self.agree("burst", got, [self.model.write(w) for w in made])

    @stateful.rule(
        ns=st.lists(pick, min_size=1, max_size=3), worker=st.sampled_from(WORKERS), expired_too=st.booleans()
    )
    def extend(self, ns: list[int], worker: int, expired_too: bool) -> None:
        """A heartbeat over any leases there ever were, or the same for those that ran out."""
        store = self.store(worker)
        held = list({lease.rollout_id: lease for _, lease in (self.lease(n) for n in ns)}.values())
        pairs = [(lease.rollout_id, lease.fence) for lease in held]
        extended = leases.reacquire if expired_too else leases.renew
        done = store._writer.write(
            "heartbeat",
            lambda c: extended(c, store.dialect, store.worker.worker_id, pairs, ttl_ms=round(TTL_S * 1000)),
        )
        expected = self.model.extend(store.worker.worker_id, held, expired_too=expired_too)
        self.agree(extended.__name__, self.call(done), expected)

    @stateful.rule(
        n=pick,
        k=pick,
        what=st.sampled_from(("cancel", "close", "close", "same request", "other request", "crash")),
    )
    def aside(self, n: int, k: int, what: str) -> None:
        """What needs no lease."""
        row = self.requests[n % len(self.requests)]
        r, store = self.model.rollouts[row.id], self.store(k % 2)
        if what == "crash":
            self.bench.kill(k % 2)
            self.bench.said[what] += 1
        elif what == "cancel":
            self.agree(what, self.call(store.request_cancel(row.id)), self.model.request_cancel(r))
        elif what != "close":
            other = what == "other request"
            sent = replace(row, id=self.bench.name("again"), request_sha256=what if other else "request")
            self.agree(what, self.call(store.submit([sent])), errors.Conflict if other else [(row.id, False)])
        elif (key := self.box(row.id, (*OPEN, "released"), k)) is not None:
            self.agree(what, self.call(store.close_sandbox(key, "gone")), self.model.close_sandbox(r, key))

    @stateful.rule(ms=st.sampled_from((1, 5_000, 59_999, 60_000, 60_001)))
    def time_passes(self, ms: int) -> None:
        self.model.now += ms
        self.bench.ask("UPDATE schema_meta SET value = :now WHERE key = 'clock'", now=str(self.model.now))

    @stateful.invariant()
    def the_database_says_what_the_model_says(self) -> None:
        self.bench.said["steps"] += 1
        stored = self.bench.stored(self.run_id)
        assert stored == {i: facts(r) for i, r in self.model.rollouts.items()}
        for rollout_id, held in stored.items():
            check_laws(*held)
            before = self.before.get(rollout_id)
            if before is not None and before[0][0] in TERMINAL:
                assert before[:3] == held[:3], "a terminal rollout changed"
        self.before = stored


def _named(expected: object) -> str:
    return expected.__name__ if isinstance(expected, type) else type(expected).__name__


@pytest.fixture
def bench_of(tmp_path, request: pytest.FixtureRequest) -> Iterator[Callable[[str], Bench]]:
    opened = []

    def made(kind: str) -> Bench:
        if kind == "sqlite":
            opened.append(Bench(f"sqlite:///{tmp_path / 'rollouts.db'}"))
        else:
            server = request.getfixturevalue("postgres_server")
            opened.append(Bench(server.create("two_workers")))
        return opened[-1]

    yield made
    for bench in opened:
        bench.close()


def play(bench: Bench, *, examples: int, steps: int, known: bool) -> None:
    """Run the machine and say what it did; `known` draws the same histories every time."""

    class Played(TwoWorkers):
        def __init__(self) -> None:
            super().__init__(bench)

    stateful.run_state_machine_as_test(
        Played,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            derandomize=known,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    for what, number in sorted(bench.said.items()):
        sys.stdout.write(f"{number:7d} {what}\n")


@pytest.mark.slow
def test_sqlite_and_the_model_agree(bench_of):
    play(bench_of("sqlite"), examples=20, steps=30, known=True)


@pytest.mark.slow
@pytest.mark.postgres
def test_postgresql_and_the_model_agree(bench_of):
    play(bench_of("postgresql"), examples=8, steps=30, known=True)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "examples"), [("sqlite", 60), pytest.param("postgresql", 35, marks=pytest.mark.postgres)]
)
def test_thousands_of_steps_agree_with_the_model(bench_of, kind: str, examples: int):
    play(bench_of(kind), examples=examples, steps=60, known=False)
