"""The protocol of lease, fence and sandbox ledger as a small machine whose every reachable state can be visited.

Two workers, one rollout, a sweeper and a provider take their steps in every order; anybody may crash between two steps,
leases run out at any time, a creation may finish after its caller died, a write may arrive after its caller gave up.
Switching off one of `Rules` shows, as a trace, what that rule is for.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from orchestrator.states import EDGES, State

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """What the protocol relies on; each may be switched off."""

    fence_in_where: bool = True
    version_in_where: bool = True
    lease_in_where: bool = True
    ledger_in_where: bool = True
    """The edge `release` demands that no ledger row of the rollout is open."""
    reacquire_checks_fence: bool = True
    intent_before_create: bool = True
    confirmed_before_released: bool = True
    failed_list_is_not_empty: bool = True
    late_creations_awaited: bool = True
    """A row whose creation was never answered is closed only by a list taken after its `create_deadline`."""
    creations_end_by_deadline: bool = True
    """An assumption about the provider and the clock, not a check: after the deadline nothing comes into being."""
    graded_never_fails: bool = True


class Box(NamedTuple):
    """One sandbox key: its ledger row, and what the provider has."""

    row: str = ""
    answered: bool = False
    due: bool = False
    calling: bool = False
    exists: bool = False


class Worker(NamedTuple):
    """One process: its next instruction and what it believes about the rollout."""

    next: str = "idle"
    fence: int = 0
    version: int = 0
    state: str = ""


class Late(NamedTuple):
    """A transition whose caller gave up waiting; the store may still make it."""

    trigger: str
    worker: int
    by: Worker


class World(NamedTuple):
    """Everything that outlives an instruction. `broken` names a rule of conduct that a write has just violated."""

    state: str
    version: int
    fence: int
    owner: int
    lease: bool
    rewards: int
    boxes: tuple[Box, ...]
    workers: tuple[Worker, Worker]
    sweeper: tuple[str, int]
    late: Late | None
    late_used: bool
    broken: str


Step = tuple[str, World]
OPEN = ("intent", "live", "releasing")
TERMINAL = (State.RELEASED.value, State.FAILED.value)
_NOBODY = -1
_AWAKE = ("", 0)
_EDGES = {(src.value, trigger): dst.value for (src, trigger), dst in EDGES.items()}


@dataclass(frozen=True, slots=True)
class Found:
    """What a search came to: how many states, and the shortest way to a broken invariant when there is one."""

    states: int
    steps: int
    broken: str = ""
    trace: tuple[str, ...] = ()


def search(rules: Rules, *, claims: int = 2, late_writes: bool = True) -> Found:
    """Visit every state that is reachable with at most `claims` claims, breadth first, up to the first broken one.

    With `late_writes`, one transition may arrive after its caller gave up waiting for it.
    """
    start = _start(claims)._replace(late_used=not late_writes)
    came: dict[World, tuple[World, str] | None] = {start: None}
    back: dict[World, list[World]] = {}
    waiting = deque([start])
    steps = 0
    while waiting:
        world = waiting.popleft()
        for label, after in _steps(world, rules):
            steps += 1
            back.setdefault(after, []).append(world)
            if after in came:
                continue
            came[after] = (world, label)
            if why := broken(after):
                return Found(len(came), steps, why, _trace(came, after))
            waiting.append(after)
    stuck = _first_that_cannot_end(came, back)
    if stuck is not None:
        return Found(len(came), steps, "a rollout can never end from here", _trace(came, stuck))
    return Found(len(came), steps)


def broken(world: World) -> str:
    """Return the invariant that does not hold here, or nothing."""
    closed = [box for box in world.boxes if box.row not in OPEN]
    kept = world.state in (State.GRADED, State.RELEASED)
    checks = {
        world.broken: bool(world.broken),
        "a sandbox exists without an open ledger row": any(box.exists for box in closed),
        "a rollout is released while a sandbox of it exists": world.state == State.RELEASED
        and any(box.exists or box.row in OPEN for box in world.boxes),
        "more than one reward": world.rewards > 1,
        "a recorded reward was lost": world.rewards > 0 and not kept,
        "a graded rollout without a reward": kept and world.rewards == 0,
    }
    return next((why for why, holds in checks.items() if holds), "")


def _start(claims: int) -> World:
    return World(
        state=State.CREATED.value, version=0, fence=0, owner=_NOBODY, lease=False, rewards=0,
        boxes=(Box(),) * claims, workers=(Worker(), Worker()), sweeper=_AWAKE, late=None, late_used=False, broken="",
    )  # fmt: skip


def _trace(came: dict[World, tuple[World, str] | None], world: World) -> tuple[str, ...]:
    labels = []
    at = came[world]
    while at is not None:
        before, label = at
        labels.append(label)
        at = came[before]
    return tuple(reversed(labels))


def _first_that_cannot_end(
    came: dict[World, tuple[World, str] | None], back: dict[World, list[World]]
) -> World | None:
    """Return the earliest state from which no path leads to a terminal rollout with a closed ledger."""
    good = {world for world in came if world.state in TERMINAL and _settled(world)}
    waiting = list(good)
    while waiting:
        for before in back.get(waiting.pop(), ()):
            if before not in good:
                good.add(before)
                waiting.append(before)
    return next((world for world in came if world not in good), None)


def _settled(world: World) -> bool:
    return not any(box.row in OPEN or box.exists or box.calling for box in world.boxes)


def _steps(world: World, rules: Rules) -> Iterator[Step]:
    yield from _nature(world, rules)
    yield from _sweeper(world, rules)
    for n in (0, 1):
        yield from _worker(world, rules, n)


def _nature(world: World, rules: Rules) -> Iterator[Step]:
    """Yield what nobody decides: time, the provider's slowness, a write on its way, crashes."""
    if world.lease:
        yield "the lease runs out", world._replace(lease=False)
    for key, box in enumerate(world.boxes):
        if box.calling:
            yield f"the provider makes box {key + 1}", _box(world, key, calling=False, exists=True)
            yield f"the provider refuses box {key + 1}", _box(world, key, calling=False)
        if box.row and not box.due and not (rules.creations_end_by_deadline and _may_still_come(world, key)):
            yield f"the create deadline of box {key + 1} passes", _box(world, key, due=True)
    if world.late is not None:
        gone = world._replace(late=None)
        landed = _write(gone, rules, world.late.by, world.late.trigger)
        yield f"worker {world.late.worker}'s late {world.late.trigger} arrives", landed or gone
    if world.fence < len(world.boxes):
        for n, worker in enumerate(world.workers):
            if worker.next != "idle":
                yield f"worker {n} crashes before it can {worker.next}", _become(world, n, Worker())
    if world.sweeper != _AWAKE:
        yield "the sweeper crashes", world._replace(sweeper=_AWAKE)


def _may_still_come(world: World, key: int) -> bool:
    sending = (w for w in world.workers if w.fence == key + 1 and w.next in ("create", "note the intent"))
    return world.boxes[key].calling or any(sending)


def _sweeper(world: World, rules: Rules) -> Iterator[Step]:
    """Remove what was given up: delete, look whether it is gone, close the row. Needs no lease."""
    doing, key = world.sweeper
    if doing == "close":
        closed = world if world.boxes[key].row != "releasing" else _box(world, key, row="released")
        yield f"sweeper: close the row of box {key + 1}", closed._replace(sweeper=_AWAKE)
        return
    for key, box in enumerate(world.boxes):
        if box.row != "releasing":
            continue
        if box.exists:
            yield f"sweeper: delete box {key + 1}", _box(world, key, exists=False)
        answers = box.answered or box.due or not rules.late_creations_awaited
        if answers and (not box.exists or not rules.confirmed_before_released):
            yield f"sweeper: list without box {key + 1}", world._replace(sweeper=("close", key))
        if answers and not rules.failed_list_is_not_empty:
            yield "sweeper: list fails, taken for empty", world._replace(sweeper=("close", key))


def _worker(world: World, rules: Rules, n: int) -> Iterator[Step]:
    worker = world.workers[n]
    if worker.next == "idle":
        if world.state not in TERMINAL and not world.lease and world.fence < len(world.boxes):
            yield f"worker {n} claims", _claim(world, n)
        return
    mine = worker.fence == world.fence and world.owner == n
    if not world.lease and world.state not in TERMINAL and (mine or not rules.reacquire_checks_fence):
        why = "" if mine else "a lease was taken back that somebody else owns"
        yield f"worker {n} reacquires", world._replace(lease=True, broken=why)
    yield from _effects(world, n, worker)
    yield from _writes(world, rules, n, worker)


def _claim(world: World, n: int) -> World:
    claimed = world._replace(fence=world.fence + 1, owner=n, lease=True)
    return _become(claimed, n, Worker("settle", claimed.fence, world.version, world.state))


def _effects(world: World, n: int, worker: Worker) -> Iterator[Step]:
    """Instructions that touch the provider instead of the store."""
    key = worker.fence - 1
    if worker.next == "create":
        calling = _box(world, key, calling=True)
        yield f"worker {n} asks for box {worker.fence}", _become(calling, n, worker._replace(next="answer"))
    elif worker.next == "answer" and not world.boxes[key].calling:
        come = "note the intent" if not world.boxes[key].row else "provision"
        then = come if world.boxes[key].exists else "fail"
        yield f"worker {n} hears the provider", _become(world, n, worker._replace(next=then))


def _writes(world: World, rules: Rules, n: int, worker: Worker) -> Iterator[Step]:
    """Instructions that write under the lease."""
    moves = _TRIGGERS.get((worker.next, worker.state), ())
    if worker.state == State.GRADED and not rules.graded_never_fails:
        moves = (*moves, "fail")
    if worker.next in ("settle", "give up") and "restart" not in moves:
        noted = _write(world, rules, worker, None)
        done = None if noted is None else _give_up(noted)
        yield f"worker {n} gives the sandboxes up", _after(done, world, n, worker, rules, settled=True)
    if worker.next == "note the intent":
        noted = _write(world, rules, worker, None)
        then = worker._replace(next="create" if rules.intent_before_create else "provision")
        done = None if noted is None else _become(_box(noted, worker.fence - 1, row="intent"), n, then)
        yield f"worker {n} notes the intent", done or _refused(world, n, worker, rules)
    for trigger in moves:
        if trigger == "release" and rules.ledger_in_where and any(box.row in OPEN for box in world.boxes):
            continue
        done = _write(world, rules, worker, trigger)
        yield f"worker {n}: {trigger}", _after(done, world, n, worker, rules)
        if not world.late_used and trigger != "release":
            late = world._replace(late=Late(trigger, n, worker._replace(next="")), late_used=True)
            yield f"worker {n} gives up waiting for {trigger}", _refused(late, n, worker, rules)


def _after(
    done: World | None, before: World, n: int, worker: Worker, rules: Rules, *, settled: bool = False
) -> World:
    if done is None:
        return _refused(before, n, worker, rules)
    return _become(done, n, _plan(done, worker, rules, settled=settled))


def _refused(world: World, n: int, worker: Worker, rules: Rules) -> World:
    """Stop for good when the rollout is over or somebody else's; else read again (a lease run out is reacquired)."""
    return _become(world, n, _plan(world, worker, rules) if worker.fence == world.fence else Worker())


_TRIGGERS = {
    ("settle", State.CREATED.value): ("fail",),
    ("settle", State.SANDBOX_READY.value): ("restart", "fail"),
    ("provision", State.CREATED.value): ("provision",),
    ("work", State.SANDBOX_READY.value): ("grade", "fail"),
    ("release", State.GRADED.value): ("release",),
    ("fail", State.CREATED.value): ("fail",),
}
"""(instruction, state believed) -> transitions a worker may ask for; agent and patch are folded into `grade`."""


def _plan(world: World, worker: Worker, rules: Rules, *, settled: bool = False) -> Worker:
    """Return the worker as it goes on from what the store now says."""
    box = world.boxes[worker.fence - 1]
    first = "note the intent" if rules.intent_before_create else "create"
    then = {
        State.CREATED.value: first if not box.row and not box.exists and not box.calling else "fail",
        State.SANDBOX_READY.value: "work" if box.row == "live" else "settle",
        State.GRADED.value: "release" if settled else "give up",
    }.get(world.state)
    return Worker() if then is None else Worker(then, worker.fence, world.version, world.state)


def _write(world: World, rules: Rules, by: Worker, trigger: str | None) -> World | None:
    """Make a guarded write, None when the guard refuses: fence, lease, version and edge, as the store's WHERE has them."""
    refused = (
        (rules.fence_in_where and by.fence != world.fence)
        or (rules.lease_in_where and not world.lease)
        or (rules.version_in_where and trigger is not None and by.version != world.version)
        or world.state in TERMINAL
    )
    if refused:
        return None
    conduct = {
        "a stale worker changed something": by.fence != world.fence,
        "a worker wrote after its lease had run out": not world.lease,
        "a write was applied to a state its writer had not seen": trigger is not None
        and by.version != world.version,
    }
    seen = world._replace(broken=next((why for why, holds in conduct.items() if holds), ""))
    return seen if trigger is None else _move(seen, rules, by, trigger)


def _move(world: World, rules: Rules, by: Worker, trigger: str) -> World | None:
    to = _edge(world.state, trigger, rules)
    if to is None or (trigger == "provision" and world.boxes[by.fence - 1].row != "intent"):
        return None
    after = world._replace(state=to, version=world.version + 1, rewards=world.rewards + (trigger == "grade"))
    if trigger == "provision":
        after = _box(after, by.fence - 1, row="live", answered=True)
    if trigger in ("restart", "fail"):
        after = _give_up(after)
    return after._replace(owner=_NOBODY, lease=False) if to in TERMINAL else after


def _edge(state: str, trigger: str, rules: Rules) -> str | None:
    if state == State.SANDBOX_READY and trigger == "grade":
        return State.GRADED.value
    if state == State.GRADED and trigger == "fail" and not rules.graded_never_fails:
        return State.FAILED.value
    return _EDGES.get((state, trigger))


def _give_up(world: World) -> World:
    boxes = tuple(b._replace(row="releasing") if b.row in ("intent", "live") else b for b in world.boxes)
    return world._replace(boxes=boxes)


def _box(world: World, key: int, **changed: str | bool) -> World:
    box = Box(**(world.boxes[key]._asdict() | changed))
    return world._replace(boxes=(*world.boxes[:key], box, *world.boxes[key + 1 :]))


def _become(world: World, n: int, worker: Worker) -> World:
    other = world.workers[1 - n]
    return world._replace(workers=(worker, other) if n == 0 else (other, worker))
