"""The store as a pure model: what each operation must answer and leave behind, as a fold over the calls."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from orchestrator import states
from store import errors, rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    Result = rows.Outcome | type[errors.StoreError]

EDGES = {(src.value, trigger): dst.value for (src, trigger), dst in states.EDGES.items()}
TERMINAL = ("released", "failed")
OPEN = ("intent", "live", "releasing")
TTL_S = 60.0


@dataclass
class Rollout:
    """What the model knows of one rollout."""

    state: str = "created"
    version: int = 0
    fence: int = 0
    owner: str | None = None
    until: int | None = None
    not_before: int = 0
    cancel_at: int | None = None
    spent: Counter[str] = field(default_factory=Counter)
    attempts: dict[int, str | None] = field(default_factory=dict)
    log: list[tuple[str, str, int]] = field(default_factory=list)
    """(trigger, op_id, fence); its place is its number."""
    boxes: dict[str, tuple[int, str]] = field(default_factory=dict)
    steps: list[str] = field(default_factory=list)
    rewards: list[str] = field(default_factory=list)

    def give_up(self, key: str | None) -> None:
        for name, (fence, status) in self.boxes.items():
            if status in ("intent", "live") and key in (None, name):
                self.boxes[name] = (fence, "releasing")


@dataclass(frozen=True)
class Write:
    """One guarded write, so that it can be sent again."""

    lease: rows.Lease
    trigger: str | None
    op_id: str = ""
    extra: tuple[rows.Row, ...] = ()
    cancellable: bool = False
    give_back: rows.GiveBack | None = None
    spend: str | None = None


class Model:
    """The whole store as a fold over the operations that were called."""

    def __init__(self, now: int) -> None:
        self.now = now
        self.rollouts: dict[str, Rollout] = {}

    def claim(self, worker_id: str, limit: int) -> list[tuple[str, int, int, str, str | None]]:
        due = [
            (r.not_before, i)
            for i, r in self.rollouts.items()
            if r.state not in TERMINAL
            and r.not_before <= self.now
            and (r.until is None or r.until < self.now)
        ]
        return [self._take(worker_id, i) for i in sorted(i for _, i in sorted(due)[:limit])]

    def _take(self, worker_id: str, rollout_id: str) -> tuple[str, int, int, str, str | None]:
        r = self.rollouts[rollout_id]
        previous = None
        if r.attempts:
            crashed = r.attempts[r.fence] is None
            r.spent["crash"] += crashed
            previous = r.attempts[r.fence] = r.attempts[r.fence] or "crashed"
        r.fence += 1
        r.owner, r.until, r.attempts[r.fence] = worker_id, self.now + round(TTL_S * 1000), None
        return rollout_id, r.fence, r.version, r.state, previous

    def extend(self, worker_id: str, held: Sequence[rows.Lease], *, expired_too: bool) -> dict[str, bool]:
        kept = {}
        for lease in held:
            r = self.rollouts[lease.rollout_id]
            lives = r.until is not None and (expired_too or r.until > self.now)
            if lives and (r.owner, r.fence) == (worker_id, lease.fence):
                r.until = self.now + round(TTL_S * 1000)
                kept[lease.rollout_id] = r.cancel_at is not None
        return kept

    def write(self, w: Write) -> Result:
        r = self.rollouts[w.lease.rollout_id]
        refused = self._refusal(r, w)
        if refused is not None:
            return refused
        if any(isinstance(e, rows.SandboxLive) and not _waits(r, w, e.key) for e in w.extra):
            return errors.Conflict
        if w.trigger is not None:
            r.log.append((w.trigger, w.op_id, w.lease.fence))
            r.version, r.state = r.version + 1, EDGES[r.state, w.trigger]
        for extra in w.extra:
            _keep(r, w.lease.fence, extra)
        back = w.give_back
        r.spent.update(x for x in (w.spend, back.spend if back else None) if x is not None)
        if back is not None:
            r.not_before = self.now + back.delay_ms
        if back is not None or r.state in TERMINAL:
            r.owner = r.until = None
            r.attempts[w.lease.fence] = (
                back.outcome if back else "done" if r.state == "released" else "failed"
            )
        return rows.Applied(version=r.version, state=r.state)

    def _refusal(self, r: Rollout, w: Write) -> Result | None:
        v, trigger = w.lease.version, w.trigger
        mine = (w.op_id, w.lease.fence)
        if trigger is not None and 0 <= v < r.version and r.log[v][1:] == mine:
            return rows.AlreadyApplied(version=r.version, state=r.state)
        if r.fence != w.lease.fence:
            return rows.LeaseLost(fence=r.fence)
        if r.state in TERMINAL:
            return rows.Terminal(state=r.state)
        if r.until is None or r.until <= self.now:
            return rows.LeaseExpired()
        if trigger is None:
            return None
        if v != r.version:
            return rows.VersionConflict(version=r.version, state=r.state)
        if w.cancellable and r.cancel_at is not None:
            return rows.Cancelled()
        if (r.state, trigger) not in EDGES:
            return errors.IllegalTransition
        still_open = any(status in OPEN for _, status in r.boxes.values())
        return errors.Conflict if trigger == "release" and still_open else None

    def close_sandbox(self, r: Rollout, key: str) -> bool:
        fence, status = r.boxes[key]
        if status == "releasing":
            r.boxes[key] = (fence, "released")
        return status == "releasing"

    def request_cancel(self, r: Rollout) -> bool:
        heard = r.state not in (*TERMINAL, "graded")
        r.cancel_at = self.now if heard else r.cancel_at
        return heard


def _waits(r: Rollout, w: Write, key: str) -> bool:
    return r.boxes.get(key) == (w.lease.fence, "intent")


def _keep(r: Rollout, fence: int, extra: rows.Row) -> None:
    match extra:
        case rows.SandboxIntent():
            r.boxes[extra.key] = (fence, "intent")
        case rows.SandboxLive():
            r.boxes[extra.key] = (fence, "live")
        case rows.SandboxReleasing():
            r.give_up(extra.key)
        case rows.StepRow():
            r.steps.append(extra.name)
        case rows.RewardRow():
            r.rewards.append(extra.grade_id)
        case rows.Asked() | rows.GradeRow() | rows.PatchRow() | rows.LlmCallRow():
            pass


def facts(r: Rollout) -> tuple[Any, ...]:
    lease = (r.owner, r.until)
    spent = tuple(r.spent[budget] for budget in ("crash", "infra", "grade"))
    row = (r.state, r.version, r.fence, *lease, r.not_before, r.cancel_at, *spent, r.state in TERMINAL)
    log = tuple((n, *entry) for n, entry in enumerate(r.log, 1))
    boxes = tuple(sorted((key, *box) for key, box in r.boxes.items()))
    return row, log, tuple(r.attempts.items()), boxes, tuple(sorted(r.steps)), tuple(r.rewards)


def check_laws(row: Any, log: Any, attempts: Any, boxes: Any, _steps: Any, rewards: Any) -> None:
    """What must hold of the rows whatever the model says."""
    state, version, fence, owner = row[:4]
    at = "created"
    for _seq, trigger, _op_id, _fence in log:
        at = EDGES[at, trigger]
    assert at == state, "the state is the fold of the log"
    assert [seq for seq, *_ in log] == list(range(1, version + 1)), "the log has a gap"
    fences = [f for *_, f in log]
    assert fences == sorted(fences), "a stale worker moved the rollout"
    assert [f for f, _ in attempts] == list(range(1, fence + 1)), "each claim raises the fence by one"
    assert [f for f, outcome in attempts if outcome is None] == ([fence] if owner else []), "one open attempt"
    assert len(rewards) == (state in ("graded", "released")), "one reward exactly where it was graded"
    assert state != "released" or all(status not in OPEN for *_, status in boxes), "released with a sandbox"
