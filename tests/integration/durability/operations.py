"""Every write of the store on one rollout, and how a rollout gets into each state: shared by the crash tests."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import sqlalchemy as sa

from orchestrator import states
from store import errors, rows
from store.heartbeat import Heartbeat

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from store.rollouts import Store

EDGES = frozenset((src.value, trigger, dst.value) for (src, trigger), dst in states.EDGES.items())
LINE = ("provision", "start_agent", "take_patch", "grade", "release")
WAY = {
    "created": (), "sandbox_ready": LINE[:1], "agent_running": LINE[:2], "patched": LINE[:3], "graded": LINE[:4],
    "released": LINE, "failed": (*LINE[:2], "fail"),
}  # fmt: skip
"""State -> the triggers that lead there."""


def new_rollout(rollout_id: str) -> rows.NewRollout:
    return rows.NewRollout(
        id=rollout_id, idem_key=rollout_id, request_sha256="request", run_id="run", instance_id="demo__demo-1",
        task_sha256="task", task_json="{}", dataset_kind="local", eval_sha256="eval", agent_type="swe",
        config_sha256="config", endpoint_kind="stateless", input={}, fsm_version=1, outcome_table=1,
    )  # fmt: skip


def lease_of(rollout_id: str, *, fence: int, version: int, state: str = "") -> rows.Lease:
    return rows.Lease(
        rollout_id=rollout_id, fence=fence, attempt_no=fence, version=version, state=state, previous=None
    )


def intent(key: str, create_timeout_s: float = 5, ref: str = "here") -> rows.SandboxIntent:
    return rows.SandboxIntent(
        key=key,
        role="task",
        provider="local",
        provider_ref=ref,
        env_name=None,
        ttl_s=60,
        create_timeout_s=create_timeout_s,
    )


def patch() -> rows.PatchRow:
    return rows.PatchRow(
        artifact=rows.Artifact.of(b"diff"), base_commit="base", exit_reason="submitted", exit_message=""
    )


def grade(rollout_id: str, **columns: Any) -> rows.GradeRow:
    base: dict[str, Any] = {
        "grade_id": f"{rollout_id}-grade", "patch_sha256": "patch", "grader_digest": "digest", "grader": "eval",
        "grader_version": "1", "reason": "first", "outcome": "resolved", "verdict": True, "reward": 1.0,
        "mask_sample": False, "evidence": "junit", "f2p_pass": 1, "f2p_total": 1, "p2p_pass": 1, "p2p_total": 1,
        "test_map": rows.Artifact.of(b"{}"), "log": rows.Artifact.of(b"log"), "exit_code": 0,
        "task_sha256": "task", "eval_sha256": "eval", "isolation": "bwrap", "sandbox_key": None, "flags": [],
        "duration_s": 0.5,
    }  # fmt: skip
    return rows.GradeRow(**(base | columns))


def reward(rollout_id: str) -> rows.RewardRow:
    return rows.RewardRow(
        grade_id=f"{rollout_id}-grade", reward=1.0, invalid_reason=None, reward_fn_version="resolved@1",
        outcome_table=1, stats={"resolved": 1},
    )  # fmt: skip


def call(number: int = 0) -> rows.LlmCallRow:
    return rows.LlmCallRow(kind="turn", outcome="ok", request_sha256=f"request-{number}")


def box(lease: rows.Lease) -> str:
    """Return the key of the sandbox that the owner works in: another owner makes another."""
    return f"{lease.rollout_id}-box{lease.fence}"


def evidence(trigger: str, lease: rows.Lease) -> list[rows.Row]:
    """Return the rows that ride on a move, as the driver sends them."""
    rollout_id = lease.rollout_id
    if trigger == "provision":
        return [rows.SandboxLive(key=box(lease), provider_ids=["id"], isolation="bwrap")]
    if trigger == "take_patch":
        return [patch(), rows.SandboxReleasing()]
    if trigger == "grade":
        return [grade(rollout_id), reward(rollout_id)]
    if trigger in ("restart", "fail"):
        return [rows.SandboxReleasing()]
    return []


async def move(store: Store, lease: rows.Lease, trigger: str, op: str = "") -> rows.Outcome:
    return await store.transition(
        lease,
        trigger,
        op_id=op or f"{lease.rollout_id}-{lease.version}-{trigger}",
        payload={"by": trigger},
        extra=evidence(trigger, lease),
        failure=("internal", "boom") if trigger == "fail" else None,
    )


async def close_boxes(store: Store, rollout_id: str) -> None:
    for name in ("box1", "box2", "old"):
        await store.close_sandbox(f"{rollout_id}-{name}", "gone")


async def bring(store: Store, lease: rows.Lease, state: str) -> rows.Lease:
    """Walk a claimed rollout to a state.

    An earlier box of it waits for its release, the current one is intended or live, one of no rollout is overdue, and
    another one belongs to an authority of its own.
    """
    rollout_id = lease.rollout_id
    await store.declare_sandbox(intent(f"{rollout_id}-control", create_timeout_s=-1))
    await store.declare_sandbox(intent(f"{rollout_id}-afar", create_timeout_s=-999, ref=f"afar {rollout_id}"))
    await store.record(lease, [intent(f"{rollout_id}-old"), rows.SandboxReleasing()])
    await store.record(lease, [intent(box(lease))])
    for trigger in WAY[state]:
        if trigger == "take_patch":
            await store.record(lease, [rows.StepRow(name="turn-1", output={"messages": []}), call()])
        if trigger == "release":
            await close_boxes(store, rollout_id)
        moved = await move(store, lease, trigger)
        assert isinstance(moved, rows.Applied), (rollout_id, trigger, moved)
        lease = lease_of(rollout_id, fence=lease.fence, version=moved.version, state=moved.state)
    return lease


async def prepare(store: Store, wanted: Iterable[tuple[str, str]]) -> dict[str, rows.Lease]:
    """Make one rollout of each (id, state); return the leases they were brought there with, given back."""
    wanted = list(wanted)
    await store.submit([new_rollout(rollout_id) for rollout_id, _ in wanted])
    claimed = {lease.rollout_id: lease for lease in await store.claim(limit=len(wanted))}
    leases = await asyncio.gather(*(bring(store, claimed[rollout_id], state) for rollout_id, state in wanted))
    back = rows.GiveBack(outcome="interrupted")
    await asyncio.gather(
        *(
            store.record(lease, give_back=back)
            for lease, (_, state) in zip(leases, wanted, strict=True)
            if state not in ("released", "failed")
        )
    )
    return {lease.rollout_id: lease for lease in leases}


async def _beat(store: Store, lease: rows.Lease) -> str:
    said: list[str] = []
    async with _Unhurried(store) as heartbeat:
        heartbeat.hold(lease, said.append)
        heartbeat.beat()
        await asyncio.sleep(0)
    return ",".join(said) or "kept"


class _Unhurried(Heartbeat):
    """A heartbeat whose thread never starts: the test beats."""

    async def __aenter__(self) -> Self:
        return self


async def _move(trigger: str, store: Store, lease: rows.Lease) -> rows.Outcome:
    return await move(store, lease, trigger)


def validation(digest: str) -> rows.ValidationRow:
    return rows.ValidationRow(
        task_sha256="task", task_json="{}", instance_id="demo__demo-1", dataset_kind="local", eval_sha256="eval",
        grader_digest=digest, patch="noop", outcome="unresolved", as_expected=True, reasons=[],
        test_map=rows.Artifact.of(b"{}"), log=rows.Artifact.of(b"log"), duration_s=0.5,
    )  # fmt: skip


WRITES: dict[str, Callable[[Store, rows.Lease], Awaitable[Any]]] = {
    "submit": lambda s, lease: s.submit([new_rollout(f"{lease.rollout_id}-new")]),
    "claim": lambda s, lease: s.claim(limit=1, ids=[lease.rollout_id], ttl_s=3600),
    "heartbeat": _beat,
    "reacquire": lambda s, lease: s.reacquire(lease),
    "request_cancel": lambda s, lease: s.request_cancel(lease.rollout_id),
    "record": lambda s, lease: s.record(lease, [rows.StepRow(name="turn-2", output={}), call(2)], spend="infra"),
    "next_sandbox_ordinal": lambda s, lease: s.next_sandbox_ordinal(lease),
    "close_sandbox": lambda s, lease: s.close_sandbox(f"{lease.rollout_id}-old", "proof"),
    "note_failed_release": lambda s, lease: s.note_failed_release(f"{lease.rollout_id}-old", "no answer"),
    "declare_sandbox": lambda s, lease: s.declare_sandbox(intent(f"{lease.rollout_id}-new")),
    "note_live_sandbox": lambda s, lease: s.note_live_sandbox(
        rows.SandboxLive(key=f"{lease.rollout_id}-control", provider_ids=["id"], isolation="bwrap")
    ),
    "give_up_sandbox": lambda s, lease: s.give_up_sandbox(f"{lease.rollout_id}-control"),
    "give_up_abandoned": lambda s, lease: s.give_up_abandoned(
        lambda key: None if key == f"{lease.rollout_id}-control" else s.worker.worker_id
    ),
    "give_up_ownerless": lambda s, lease: s.give_up_ownerless([lease.rollout_id]),
    "take_from_dead": lambda s, lease: s.take_from_dead(["nobody"]),
    "deliver": lambda s, lease: s.deliver(rows.Delivery(delivery_id=f"{lease.rollout_id}-d", rollout_id=lease.rollout_id)),
    "write_off": lambda s, lease: s.write_off(f"afar {lease.rollout_id}", "it burned down"),
    "record_validation": lambda s, lease: s.record_validation(validation(lease.rollout_id)),
    **{f"transition.{trigger}": partial(_move, trigger) for trigger in (*LINE, "restart", "fail")},
}  # fmt: skip
"""Every write of `failpoints.WRITES` but `register` and `stop`, which are the store's opening and closing."""


async def act(store: Store, write: str, lease: rows.Lease) -> str:
    """Do one write; return what came of it, without names."""
    try:
        result = await WRITES[write](store, lease)
    except (errors.StoreError, sa.exc.IntegrityError) as e:
        return type(e).__name__
    if write == "submit":
        return f"new: {result[0][1]}"
    if isinstance(result, list):
        return f"{len(result)} of them"
    return str(result) if result is None or isinstance(result, str | bool | int) else type(result).__name__
