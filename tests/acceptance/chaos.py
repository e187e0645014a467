"""A run of chaos: workers walk real rollouts through a service that outlives them, and are killed all the time."""

from __future__ import annotations

import asyncio
import random
import signal
import threading
import time
from collections import Counter
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from orchestrator import errors, recovery, rollout, settings
from orchestrator.assembly import Worker, open_store
from orchestrator.tasks.source import load_tasks
from orchestrator.testing.model_server import ScriptedModel
from orchestrator.testing.remote_boxes import RemoteProvider
from orchestrator.testing.replay import load_replay
from store import engine
from store.heartbeat import Heartbeat
from tests.acceptance.chaos_worker import IDLE
from tests.integration.durability.forking import ROOT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from typing import Protocol

    from store.history import Record
    from tests.acceptance.chaos_worker import Workers
    from tests.integration.durability.forking import Child

    class Crashing(Protocol):
        """A database server that can be ended at once and started again."""

        def crash(self) -> None: ...
        def start(self) -> None: ...


RUN = "chaos"
TASK = ROOT / "examples" / "tasks" / "offline__wordcount-1"
REPLAY = ROOT / "examples" / "replay.yaml"
FAILPOINT_EXIT = 137
TTL_S = 2.0
_SETTINGS = {
    "retry.backoff_base_s": 0.0,
    "llm.retry_base_s": 0.0,
    "agent.timeout_s": 60.0,
    "sandbox.create_timeout_s": 8.0,  # an intent whose create was cut off stays open so long
}
_SETTLE_S = 90.0
_TRIES = 4
"""So many workers are sent to die at one place; one that they never come to again would keep all others from dying."""
_POLITE = 0.1
"""Share of the workers that are asked to stop instead of being killed."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How bad it gets. Everything that is drawn comes from `seed`; when it strikes depends on the machine."""

    kills: int
    seed: int
    workers: int = 3
    pauses: int = 2
    """SIGSTOP until somebody else has the rollout, then SIGCONT."""
    server_crashes: int = 0
    limit_s: float = 600.0


@dataclass
class Seen:
    """What the test saw from outside; the database and the oracle must agree with it."""

    acks: list[list[Any]] = field(default_factory=list)
    """[rollout, version, trigger, fence] of every acknowledged move."""
    kills: Counter[str] = field(default_factory=Counter)
    deaths: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(failpoint, state) that a worker died at."""
    passed: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(failpoint, state) -> how many workers passed it."""
    requests: list[tuple[int, int]] = field(default_factory=list)
    """(sample, epoch milliseconds) of every request of a model."""
    pauses: int = 0
    server_crashes: int = 0
    broken: list[str] = field(default_factory=list)
    """Workers that ended in a way nobody asked for."""


@dataclass(eq=False)
class Victim:
    """One worker process, and what it said last."""

    child: Child
    death: tuple[str, str] | None
    most_acks: int
    words: asyncio.Queue[Any]
    acks: int = 0
    rollout: tuple[str, int] | None = None
    struck: int | None = None
    """The exit code that it was made to end with."""

    def say_stop(self) -> None:
        with suppress(OSError):  # it has ended meanwhile
            self.child.say("stop")


class Chaos:
    """Keeps workers and rollouts coming, and kills the workers until the plan is fulfilled; then lets them finish."""

    def __init__(
        self,
        plan: Plan,
        url: str,
        workers: Workers,
        runtime: rollout.Runtime,
        address: str,
        model: ScriptedModel,
    ) -> None:
        self.plan = plan
        self.seen = Seen()
        self.submitted = 0
        self._url = url
        self._workers = workers
        self._runtime = runtime
        self._address = address
        self._model = model
        self._chance = random.Random(plan.seed)
        self._claims: dict[str, int] = {}
        self._claimed = asyncio.Condition()
        self._finishing = asyncio.Lock()
        self._submitting = asyncio.Lock()
        self._done = False
        self._tried: Counter[tuple[str, str]] = Counter()
        self._pauses = plan.pauses
        self._task = load_tasks(TASK, cache_dir=settings.cache_dir()).tasks[0]

    @property
    def killed(self) -> int:
        return sum(self.seen.kills.values())

    @property
    def killing(self) -> bool:
        return self.killed < self.plan.kills

    async def run(self, server: Crashing | None = None) -> None:
        """Return when the kills are done and every rollout is over."""
        await self._top_up()
        async with asyncio.timeout(self.plan.limit_s), asyncio.TaskGroup() as group:
            clock = group.create_task(self._time_requests())
            crashing = group.create_task(self._crash(server)) if server else None
            slots = [group.create_task(self._keep_a_worker()) for _ in range(self.plan.workers)]
            await asyncio.gather(*slots)
            clock.cancel()
            if crashing is not None:
                await crashing

    async def _top_up(self) -> None:
        """Submit rollouts so that there is always more to do than there are workers."""
        async with self._submitting:
            await self._submit_missing()

    async def _submit_missing(self) -> None:
        # The store knows what is over: a worker that is killed says nothing of the rollout that it just ended. One that
        # only waits for its sandbox to go keeps no worker busy.
        rows = await self._runtime.store.history.unfinished()
        waiting = sum(row["state"] != "graded" for row in rows)
        wanted = self.plan.workers + 2 - waiting if self.killing else 0
        if wanted <= 0:
            return
        effective = settings.load("train", arguments=_SETTINGS, environ={})
        first, self.submitted = self.submitted, self.submitted + wanted
        await rollout.submit(
            self._runtime,
            [
                rollout.Request(task=self._task, settings=effective, run_id=RUN, sample=sample)
                for sample in range(first, first + wanted)
            ],
        )

    async def _keep_a_worker(self) -> None:
        while not self._done:
            await self._top_up()
            victim = self._start()
            while (word := await victim.words.get()) is not None:
                await self._hear(victim, word)
                if self.killing and victim.struck is None and victim.acks >= victim.most_acks:
                    await self._strike(victim)
            self._bury(victim)

    def _start(self) -> Victim:
        death = self._next_death() if self.killing else None
        child = self._workers.start(
            "work",
            url=self._url,
            address=self._address,
            model_url=f"http://127.0.0.1:{self._model.port}",
            death=death and list(death),
            ttl_s=TTL_S,
        )
        most = self._chance.randint(4, 12) if death else self._chance.randint(1, 5)
        victim = Victim(child=child, death=death, most_acks=most, words=asyncio.Queue())
        threading.Thread(
            target=_read_on, args=(victim, asyncio.get_running_loop()), name=f"read {child.pid}", daemon=True
        ).start()
        return victim

    def _next_death(self) -> tuple[str, str] | None:
        """Choose a place that workers pass and nobody died at, a new failpoint first; some workers die elsewhere."""
        open_places = sorted(
            place
            for place in self.seen.passed.keys() - self.seen.deaths.keys()
            if self._tried[place] < _TRIES
        )
        if not open_places or self._chance.random() < 0.25:
            return None
        known = {point for point, _ in self.seen.deaths}
        place = min(
            open_places,
            key=lambda p: (self._tried[p], p[0] in known, -self.seen.passed[p], self._chance.random()),
        )
        self._tried[place] += 1
        return place

    async def _hear(self, victim: Victim, word: list[Any]) -> None:
        match word:
            case ["claimed", rollout_id, fence]:
                victim.acks += 1
                victim.rollout = (rollout_id, fence)
                async with self._claimed:
                    self._claims[rollout_id] = max(fence, self._claims.get(rollout_id, 0))
                    self._claimed.notify_all()
            case ["moved", *ack]:
                victim.acks += 1
                self.seen.acks.append(ack)
            case ["passed", point, state]:
                self.seen.passed[point, state] += 1
            case ["over", *_]:
                victim.rollout = None
                await self._top_up()
            case ["broke", text]:
                self.seen.broken.append(text)
            case [said] if said == IDLE and not self.killing:
                await self._finish(victim)

    async def _strike(self, victim: Victim) -> None:
        """Kill a worker, or make it stand still past its lease, or ask it to stop, a moment from now."""
        await asyncio.sleep(self._chance.random() * 0.3)  # somewhere in the middle of things
        if self._chance.random() < _POLITE or (victim.death or ("",))[0].startswith("stop."):
            victim.struck = 0
            victim.say_stop()
        elif self._pauses > 0 and victim.rollout is not None and self._chance.random() < 0.3:
            self._pauses -= 1
            victim.most_acks = victim.acks + self._chance.randint(2, 9)
            with suppress(ProcessLookupError):
                await self._pause(victim, *victim.rollout)
        else:
            victim.struck = -signal.SIGKILL
            with suppress(ProcessLookupError):
                victim.child.signal(signal.SIGKILL)

    async def _pause(self, victim: Victim, rollout_id: str, fence: int) -> None:
        victim.child.signal(signal.SIGSTOP)
        try:
            await self._taken_over(rollout_id, fence)
        finally:
            victim.child.signal(signal.SIGCONT)
        self.seen.pauses += 1

    async def _taken_over(self, rollout_id: str, fence: int) -> None:
        """Wait until somebody else has the rollout and did something with it, but not for ever: it may hold a lock."""
        with suppress(TimeoutError):
            async with asyncio.timeout(3 * TTL_S), self._claimed:
                await self._claimed.wait_for(lambda: self._claims.get(rollout_id, 0) > fence)
        await asyncio.sleep(self._chance.random() * TTL_S)

    def _bury(self, victim: Victim) -> None:
        code = victim.child.wait()
        if code == FAILPOINT_EXIT and victim.death is not None:
            self.seen.kills["at a failpoint"] += 1
            self.seen.deaths[victim.death] += 1
        elif code == victim.struck == -signal.SIGKILL:
            self.seen.kills["at random"] += 1
        elif code != 0 or victim.struck is None:
            self.seen.broken.append(f"a worker ended with {code}")
        if len(self.seen.broken) > 2 * self.plan.workers:
            raise AssertionError("workers do not work:\n" + "\n".join(self.seen.broken))

    async def _finish(self, victim: Victim) -> None:
        """Look whether everything is over when a worker has nothing to do; what waits for its turn gets it now."""
        async with self._finishing:
            if not self._done:
                self._done = await asyncio.to_thread(_hurry, self._url) == 0
        if self._done:
            victim.struck = 0
            victim.say_stop()

    async def _time_requests(self) -> None:
        """Note when each request of a model came."""
        while True:
            await self._model.wait_for(lambda model: bool(model.requests))
            now_ms = time.time_ns() // 1_000_000
            self.seen.requests += [(request.sample, now_ms) for request in self._model.requests]
            self._model.requests.clear()

    async def _crash(self, server: Crashing) -> None:
        for number in range(self.plan.server_crashes):
            await self._killed_so_many(self.plan.kills * (number + 1) // (self.plan.server_crashes + 1))
            await asyncio.to_thread(server.crash)
            await asyncio.to_thread(server.start)
            self.seen.server_crashes += 1

    async def _killed_so_many(self, number: int) -> None:
        async with self._claimed:
            await self._claimed.wait_for(lambda: self.killed >= number)


def _read_on(victim: Victim, loop: asyncio.AbstractEventLoop) -> None:
    """Pass everything on that a worker says; the last word is None."""
    word: Any = ""
    while word is not None:
        try:
            word = victim.child.hear()
        except TimeoutError:
            continue
        except AssertionError as e:
            word = ["broke", str(e)]
        except OSError:
            word = None
        with suppress(RuntimeError):  # the test gave up meanwhile
            loop.call_soon_threadsafe(victim.words.put_nowait, word)


def _hurry(url: str) -> int:
    """Let nobody wait for the next try of a release; return how many rollouts are not over."""
    writing = engine.write_engine(engine.parse_url(url))
    try:
        with writing.begin() as connection:
            live = "state NOT IN ('released', 'failed')"
            connection.execute(sa.text(f"UPDATE rollouts SET not_before = 0 WHERE {live} AND not_before > 0"))
            return int(
                connection.execute(sa.text(f"SELECT count(*) FROM rollouts WHERE {live}")).scalar_one()
            )
    finally:
        writing.dispose()


@asynccontextmanager
async def outside(url: str, address: str) -> AsyncIterator[rollout.Runtime]:
    """Be a process that submits and cleans up, and walks nothing."""
    store = await open_store(url)
    provider = RemoteProvider(address)

    def endpoint_of(_row: Record, _settings: object) -> Any:
        raise AssertionError("the test walks no rollout itself")

    async with Heartbeat(store) as heartbeat:
        yield Worker(store=store, heartbeat=heartbeat).runtime(provider, endpoint_of)
    await provider.close()
    await store.close()


@asynccontextmanager
async def scripted_model() -> AsyncIterator[ScriptedModel]:
    async with ScriptedModel(load_replay(REPLAY)) as model:
        yield model


async def clean(runtime: rollout.Runtime) -> list[str]:
    """Clean until the ledger is closed; return what a closed ledger row lied about, and what the service still has."""
    lies: list[str] = []
    async with asyncio.timeout(_SETTLE_S):
        while True:
            done = await recovery.clean(runtime.store, lambda _name: runtime.provider)
            lies += [
                f"{swept.key} ({swept.outcome}: {swept.detail})"
                for swept in done.swept
                if not swept.rollout_id
            ]
            if done.clean and not await runtime.store.history.open_sandboxes():
                break
            await asyncio.sleep(0.2)  # a create call that was cut off may take effect until its deadline
    while True:
        with suppress(errors.SandboxLost):
            return lies + [box.key for box in await runtime.provider.list_ours("")]
