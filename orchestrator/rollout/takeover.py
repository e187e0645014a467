"""What a new owner does with what the old one left: use it when that is provably safe, else give it up.

A fence cannot keep a paused owner from typing into a sandbox; only the owner's death can.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator import errors
from orchestrator.agents import registry
from orchestrator.rollout import custody, transcript
from orchestrator.rollout.owned import OwnedSandbox
from orchestrator.sandbox.base import Role
from orchestrator.states import State
from store import rows

if TYPE_CHECKING:
    from orchestrator.agents.base import Step
    from orchestrator.rollout.walk import Walk
    from orchestrator.sandbox.base import Sandbox
    from store.history import Record

logger = logging.getLogger(__name__)

_BEFORE_THE_PATCH = (State.SANDBOX_READY, State.AGENT_RUNNING)


@dataclass(frozen=True, kw_only=True, slots=True)
class Left:
    """What a dead owner left and a new one goes on with."""

    sandbox: Sandbox
    base_commit: str = ""
    steps: tuple[Step, ...] = ()


async def settle(walk: Walk) -> Left | None:
    """Bring a claimed rollout to where its work can go on; return what can be used as it is.

    Raises `errors.WorkerLost` when too many workers died on it, or when its caller's session cannot be continued.
    """
    if walk.state is State.GRADED:
        return None  # the release that comes now finds all that was left
    await _refuse_lost_session(walk)
    if walk.lease.previous is None:
        return None
    _refuse_poison(walk)
    left = None
    if walk.state in _BEFORE_THE_PATCH:
        left = await _usable(walk)
        if left is None:
            await walk.move(
                "restart", payload={"previous": walk.lease.previous}, extra=[rows.SandboxReleasing()]
            )
    try:
        if left is not None:
            logger.warning("rollout %s: continues in sandbox %s", walk.lease.rollout_id, left.sandbox.key)
            await walk.note([rows.SandboxReleasing(but=left.sandbox.key)])
        elif walk.state not in _BEFORE_THE_PATCH:
            await walk.note([rows.SandboxReleasing()])
        await custody.release_given_up(walk.runtime, walk.lease.rollout_id)
    except BaseException:
        if left is not None:
            await left.sandbox.detach()
        raise
    return left


def _refuse_poison(walk: Walk) -> None:
    crashes = walk.row["crash_count"]
    poisoned = walk.lease.previous == "crashed" and crashes > errors.BUDGETS[errors.Budget.CRASH]
    if poisoned and walk.state is not State.GRADED:
        raise errors.WorkerLost(
            f"{crashes} workers died on this rollout", hint="look at what they had in common"
        )


async def _refuse_lost_session(walk: Walk) -> None:
    """Raise `errors.WorkerLost` where the caller's session is gone, or where it would be sampled in twice."""
    if walk.row["endpoint_kind"] != "session" or walk.state not in (State.CREATED, *_BEFORE_THE_PATCH):
        return
    hint = "the trainer asks for a new rollout itself; nothing is to be done"
    if not walk.runtime.serves_sessions:
        raise errors.WorkerLost("its worker is gone, and so is the session of its caller", hint=hint)
    if walk.state is State.AGENT_RUNNING and await transcript.has_asked(
        walk.runtime.store.history, walk.lease.rollout_id
    ):
        raise errors.WorkerLost("its worker died in the middle of the caller's session", hint=hint)


async def _usable(walk: Walk) -> Left | None:
    """Return the sandbox that the last owner left, with how far its agent came; None when nothing proves it safe."""
    history, rollout_id = walk.runtime.store.history, walk.lease.rollout_id
    if walk.lease.previous != "crashed":
        return None
    boxes = [
        row
        for row in await history.of_rollout("sandboxes", rollout_id)
        if row["status"] == "live" and row["role"] == Role.TASK.value
    ]
    provider = walk.runtime.provider
    if len(boxes) != 1 or (boxes[0]["provider"], boxes[0]["provider_ref"]) != (provider.name, provider.ref):
        return None
    if not await _owners_are_dead(walk, since=boxes[0]["fence"]):
        return None
    if walk.state is State.SANDBOX_READY:
        sandbox = await _attached(walk, boxes[0])
        return None if sandbox is None else Left(sandbox=sandbox)
    if not registry.continues(walk.settings.agent.type) or walk.row["endpoint_kind"] != "stateless":
        return None
    moves = await history.of_rollout("transitions", rollout_id)
    begun = next(move for move in reversed(moves) if move["trig"] == "start_agent")
    steps = transcript.restored(*await transcript.since(history, rollout_id, begun["fence"]))
    sandbox = None if steps is None else await _attached(walk, boxes[0])
    if steps is None or sandbox is None:
        return None
    return Left(sandbox=sandbox, base_commit=begun["payload"]["base_commit"], steps=tuple(steps))


async def _owners_are_dead(walk: Walk, *, since: int) -> bool:
    """Say whether everybody who ever had the sandbox made under the fence `since` is provably dead."""
    attempts = await walk.runtime.store.history.of_rollout("attempts", walk.lease.rollout_id)
    owners = {row["worker_id"] for row in attempts if since <= row["fence"] < walk.lease.fence}
    return bool(owners) and all([await walk.runtime.store.is_dead(owner) for owner in owners])


async def _attached(walk: Walk, row: Record) -> Sandbox | None:
    """Attach to a sandbox that has enough of its time left and still runs commands."""
    agent = walk.settings.agent
    needed_ms = (agent.timeout_s + walk.settings.grading.extract_timeout_s) * 1000
    if row["expires_at"] - await walk.runtime.store.history.now() < needed_ms:
        return None
    spec = custody.spec_of(row["key"], Role(row["role"]), walk.task, walk.settings, fence=walk.lease.fence)
    try:
        sandbox = await walk.runtime.provider.attach(spec, row["provider_ids"][0])
    except (errors.SandboxLost, errors.SandboxCreateFailed) as e:
        logger.warning("rollout %s: its sandbox cannot be used any more: %s", walk.lease.rollout_id, e)
        return None
    if await sandbox.alive():
        return OwnedSandbox(sandbox, walk.sure)
    await sandbox.detach()
    return None
