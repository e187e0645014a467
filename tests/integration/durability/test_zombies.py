"""Every public write of the store under every kind of staleness: what it is answered, and that nothing changes."""

from __future__ import annotations

import asyncio
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import pytest
import sqlalchemy as sa

from store import errors, rows
from store.heartbeat import Heartbeat
from store.rollouts import Store
from tests.integration.durability import facts, operations

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tests.conftest import Database

STALE = (
    "claimed by another", "version old", "lease ran out", "given back", "released", "failed", "graded",
    "cancelled", "unknown",
)  # fmt: skip
"""How a worker can be out of date about a rollout that it moved to `sandbox_ready` as its second owner."""

CONFLICT, ILLEGAL = errors.Conflict, errors.IllegalTransition
LOST, EXPIRED = rows.LeaseLost, rows.LeaseExpired
TERMINAL, OLD, DONE = rows.Terminal, rows.VersionConflict, rows.Applied

NOTES: dict[str, Callable[[rows.Lease], list[rows.Row]]] = {
    "StepRow": lambda lease: [rows.StepRow(name="late", output={})],
    "LlmCallRow": lambda lease: [operations.call(9)],
    "PatchRow": lambda lease: [operations.patch()],
    "GradeRow": lambda lease: [
        operations.grade(lease.rollout_id, grade_id=f"{lease.rollout_id}-late", reason="regrade")
    ],
    "RewardRow": lambda lease: [
        operations.grade(lease.rollout_id, grade_id=f"{lease.rollout_id}-late", reason="regrade"),
        rows.RewardRow(
            grade_id=f"{lease.rollout_id}-late", reward=1.0, invalid_reason=None, reward_fn_version="resolved@1",
            outcome_table=1, stats={},
        ),
    ],
    "SandboxIntent": lambda lease: [operations.intent(f"{lease.rollout_id}-late")],
    "SandboxLive": lambda lease: [
        operations.intent(f"{lease.rollout_id}-late"),
        rows.SandboxLive(key=f"{lease.rollout_id}-late", provider_ids=["x"], isolation="bwrap"),
    ],
    "Asked": lambda _lease: [rows.Asked()],
    "SandboxReleasing": lambda lease: [rows.SandboxReleasing()],
}  # fmt: skip
"""A fact of each kind."""

MOVES = (*operations.LINE, "restart", "fail")
GUARDED: dict[str, Any] = {
    **{f"transition {t}": lambda s, lease, t=t: operations.move(s, lease, t) for t in MOVES},
    "transition cancellable": lambda s, lease: s.transition(
        lease, "start_agent", op_id="late", cancellable=True
    ),
    "transition giving back": lambda s, lease: s.transition(
        lease, "start_agent", op_id="late", give_back=rows.GiveBack(outcome="failed", spend="infra")
    ),
    **{f"record {kind}": lambda s, lease, of=of: s.record(lease, of(lease)) for kind, of in NOTES.items()},
    "record spending": lambda s, lease: s.record(lease, spend="grade"),
    "record giving back": lambda s, lease: s.record(
        lease, give_back=rows.GiveBack(outcome="failed", error_class="late", spend="crash", delay_ms=5)
    ),
}
"""Writes under a lease: refused as one, by the reason."""

REFUSED = {
    "claimed by another": LOST, "version old": OLD, "lease ran out": EXPIRED, "given back": EXPIRED,
    "released": TERMINAL, "failed": TERMINAL, "unknown": CONFLICT,
}  # fmt: skip
"""Staleness -> answer to every guarded write, but for the exceptions below."""

LEGAL_FROM_READY = {"start_agent", "restart", "fail", "cancellable", "giving back"}


def expected(write: str, staleness: str) -> Any:
    """Return the answer of section 3 of the protocol, read from its table by hand."""
    kind, _, what = write.partition(" ")
    if (what, staleness) == ("RewardRow", "graded"):
        return errors.Conflict  # one reward per rollout, whoever brings the second
    if kind == "record" and staleness in ("version old", "graded", "cancelled"):
        return DONE  # evidence needs the lease, not the newest version; a cancelled owner may still say what happened
    if staleness == "cancelled":
        if what == "cancellable":
            return rows.Cancelled
        return DONE if what in LEGAL_FROM_READY else ILLEGAL
    if staleness == "graded":
        return DONE if what == "release" else ILLEGAL  # above all: no `fail`
    return REFUSED[staleness]


async def held(worker: Store, names: Iterable[str], ttl_s: float = 3600.0) -> dict[str, rows.Lease]:
    """Return leases, of the second owner, on rollouts in `sandbox_ready`, each with a box that awaits its release."""
    names = list(names)
    await operations.prepare(worker, [(name, "sandbox_ready") for name in names])
    return {lease.rollout_id: lease for lease in await worker.claim(limit=len(names), ids=names, ttl_s=ttl_s)}


async def forward(store: Store, lease: rows.Lease, *triggers: str) -> rows.Lease:
    for trigger in triggers:
        moved = await operations.move(store, lease, trigger, op=f"{lease.rollout_id}-{trigger}-before")
        assert isinstance(moved, DONE)
        lease = operations.lease_of(lease.rollout_id, fence=lease.fence, version=moved.version)
    return lease


async def _grow_old(worker: Store, _other: Store, lease: rows.Lease) -> rows.Lease:
    await forward(worker, lease, "start_agent")
    return lease


async def _give_back(worker: Store, _other: Store, lease: rows.Lease) -> rows.Lease:
    await worker.record(lease, give_back=rows.GiveBack(outcome="interrupted"))
    return lease


async def _lose(worker: Store, other: Store, lease: rows.Lease) -> rows.Lease:
    await _give_back(worker, other, lease)
    assert len(await other.claim(limit=1, ids=[lease.rollout_id])) == 1
    return lease


async def _be_graded(worker: Store, _other: Store, lease: rows.Lease) -> rows.Lease:
    graded = await forward(worker, lease, "start_agent", "take_patch", "grade")
    await operations.close_boxes(worker, lease.rollout_id)
    return graded


async def _be_released(worker: Store, other: Store, lease: rows.Lease) -> rows.Lease:
    await forward(worker, await _be_graded(worker, other, lease), "release")
    return lease


async def _fail(worker: Store, _other: Store, lease: rows.Lease) -> rows.Lease:
    await forward(worker, lease, "fail")
    return lease


async def _be_cancelled(_worker: Store, other: Store, lease: rows.Lease) -> rows.Lease:
    assert await other.request_cancel(lease.rollout_id)
    return lease


async def _be_unknown(_worker: Store, _other: Store, lease: rows.Lease) -> rows.Lease:
    return operations.lease_of(f"{lease.rollout_id}-never-submitted", fence=2, version=1)


async def _run_out(_worker: Store, _other: Store, lease: rows.Lease) -> rows.Lease:
    return lease


BECOME = {
    "claimed by another": _lose, "version old": _grow_old, "lease ran out": _run_out, "given back": _give_back,
    "released": _be_released, "failed": _fail, "graded": _be_graded, "cancelled": _be_cancelled,
    "unknown": _be_unknown,
}  # fmt: skip
"""How the world moves on without telling whoever holds the lease; each returns the lease as its holder knows it."""


@dataclass(frozen=True)
class Zombies:
    """Two workers, and the first one's leases on rollouts that are stale in every way: (staleness, purpose) -> lease."""

    worker: Store
    other: Store
    leases: dict[tuple[str, str], rows.Lease]

    @classmethod
    async def made(cls, worker: Store, other: Store, purposes: Iterable[str]) -> Self:
        keys = {
            f"z{m}{n:03d}": (staleness, purpose)
            for m, staleness in enumerate(STALE)
            for n, purpose in enumerate(purposes)
        }
        short = [name for name, (staleness, _) in keys.items() if staleness == "lease ran out"]
        leases = await held(worker, short, ttl_s=0.001)
        leases |= await held(worker, keys.keys() - short)
        stale = await asyncio.gather(
            *(BECOME[staleness](worker, other, leases[name]) for name, (staleness, _) in keys.items())
        )
        return cls(worker, other, dict(zip(keys.values(), stale, strict=True)))


async def attempt(store: Store, write: Any, lease: rows.Lease) -> Any:
    try:
        return type(await write(store, lease))
    except (errors.StoreError, sa.exc.IntegrityError) as e:
        return type(e)


@pytest.mark.databases("sqlite", "postgresql")
async def test_a_stale_worker_is_told_why_and_changes_nothing(
    worker: Store, other: Store, database: Database
):
    zombies = await Zombies.made(worker, other, GUARDED)
    before = facts.dump(database.url)
    answers = {
        (staleness, write): await attempt(worker, GUARDED[write], lease)
        for (staleness, write), lease in zombies.leases.items()
    }
    after = facts.dump(database.url)
    assert answers == {(staleness, write): expected(write, staleness) for staleness, write in zombies.leases}
    parts = facts.ByOwner(after, 5), facts.ByOwner(before, 5)
    for key, lease in zombies.leases.items():
        now, then = (part.about(lease.rollout_id) for part in parts)
        assert (now == then) == (answers[key] is not DONE), key
    assert facts.violations(after, evidence=False) == []


@pytest.mark.databases("sqlite", "postgresql")
async def test_the_same_write_of_a_worker_that_lost_its_lease_since_is_known_as_applied(
    worker: Store, other: Store, database: Database
):
    leases = await held(worker, ["z1"])
    assert isinstance(await operations.move(worker, leases["z1"], "start_agent"), DONE)
    await _lose(worker, other, leases["z1"])
    before = facts.dump(database.url)
    again = await operations.move(worker, leases["z1"], "start_agent")
    assert again == rows.AlreadyApplied(version=2, state="agent_running")
    assert facts.dump(database.url) == before


KEEPS = {"version old", "lease ran out", "graded", "cancelled"}
"""Where the worker that stood there may keep, or take back, its lease."""
CANCELLABLE = {"claimed by another", "version old", "lease ran out", "given back", "cancelled"}
CLAIMABLE = {"lease ran out", "given back"}


async def beat(store: Store, lease: rows.Lease) -> Any:
    return await operations.WRITES["heartbeat"](store, lease)


@pytest.mark.databases("sqlite", "postgresql")
async def test_a_lease_is_renewed_and_taken_back_only_by_whom_it_belongs_to(
    worker: Store, other: Store, database: Database
):
    zombies = await Zombies.made(worker, other, ["renew"])
    for (staleness, _), lease in zombies.leases.items():
        before = facts.dump(database.url)
        strange = other if staleness != "claimed by another" else worker
        assert not await strange.reacquire(lease), staleness
        assert await beat(strange, lease) == "lost", staleness
        assert facts.dump(database.url) == before
        kept = "cancelled" if staleness == "cancelled" else "kept" if staleness in KEEPS else "lost"
        assert await beat(worker, lease) == kept, staleness
        assert await worker.reacquire(lease) == (staleness in KEEPS), staleness
        assert (facts.dump(database.url) == before) == (staleness not in KEEPS), staleness


@pytest.mark.databases("sqlite", "postgresql")
async def test_a_claim_and_a_cancel_ask_only_the_row(worker: Store, other: Store, database: Database):
    zombies = await Zombies.made(worker, other, ["claim"])
    for (staleness, _), lease in zombies.leases.items():
        before = facts.dump(database.url)
        claimed = await other.claim(limit=1, ids=[lease.rollout_id])
        assert len(claimed) == int(staleness in CLAIMABLE), staleness
        between = facts.dump(database.url)
        assert (between == before) == (staleness not in CLAIMABLE), staleness
        assert await worker.request_cancel(lease.rollout_id) == (staleness in CANCELLABLE), staleness
        assert (facts.dump(database.url) == between) == (staleness not in CANCELLABLE), staleness


async def test_the_ledger_believes_proof_whoever_brings_it_and_only_about_a_box_given_up(
    worker: Store, other: Store, database: Database
):
    await Zombies.made(worker, other, ["close"])
    boxes = [row for row in facts.dump(database.url)["sandboxes"] if row["rollout_id"] is not None]
    assert {"live", "releasing", "released"} <= {box["status"] for box in boxes}

    def ledger() -> list[tuple[Any, ...]]:
        return database.ask("SELECT * FROM sandboxes ORDER BY key")

    for box in boxes:
        key, releasing = box["key"], box["status"] == "releasing"
        before = ledger()
        await worker.note_failed_release(key, "no answer")
        assert (ledger() == before) == (not releasing)
        assert await worker.close_sandbox(key, "gone") == releasing
        closed = ledger()
        assert not await worker.close_sandbox(key, "another proof")
        await worker.note_failed_release(key, "late")
        assert ledger() == closed
    before = ledger()
    assert not await worker.close_sandbox("never-made", "gone")
    await worker.next_sandbox_ordinal(operations.lease_of("nobody", fence=1, version=0))
    assert ledger() == before


@pytest.mark.databases("sqlite", "postgresql")
async def test_what_is_written_about_boxes_of_no_rollout_reaches_no_box_of_a_rollout(
    worker: Store, database: Database
):
    await held(worker, ["z1"])
    before = facts.dump(database.url)
    await worker.note_live_sandbox(rows.SandboxLive(key="z1-box1", provider_ids=["other"], isolation="bwrap"))
    await worker.give_up_sandbox("z1-box1")
    assert await worker.give_up_abandoned(lambda _key: worker.worker.worker_id) == []
    with pytest.raises(sa.exc.IntegrityError):
        await worker.declare_sandbox(operations.intent("z1-box1"))
    assert facts.dump(database.url) == before
    assert await worker.give_up_abandoned(lambda _key: None) == [
        ("z1-afar", "afar z1"),
        ("z1-control", "here"),
    ]
    after = facts.dump(database.url)
    changed = [
        now["key"] for now, then in zip(after["sandboxes"], before["sandboxes"], strict=True) if now != then
    ]
    assert changed == ["z1-afar", "z1-control"]


WRITES_OF_THE_STORE = {
    "submit", "claim", "reacquire", "request_cancel", "transition", "record", "next_sandbox_ordinal",
    "close_sandbox", "note_failed_release", "record_validation", "declare_sandbox", "note_live_sandbox",
    "give_up_sandbox", "give_up_abandoned", "give_up_ownerless", "take_from_dead", "write_off", "is_dead", "may_live",
    "deliver",
}  # fmt: skip


def test_no_write_of_the_store_is_missing_here():
    methods = {
        name for name, _ in inspect.getmembers(Store, inspect.iscoroutinefunction) if not name.startswith("_")
    }
    assert methods - {"open", "close"} == WRITES_OF_THE_STORE
    assert {name for name, _ in inspect.getmembers(Heartbeat, inspect.isfunction) if name[0] != "_"} == {
        "hold", "drop", "beat", "is_sure",
    }  # fmt: skip


def test_no_kind_of_fact_and_no_move_is_missing_here():
    assert {kind.__name__ for kind in rows.Row.__args__} == set(NOTES)
    assert {trigger for _, trigger, _ in operations.EDGES} == set(MOVES)
