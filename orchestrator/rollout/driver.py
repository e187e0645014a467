"""The one place that catches: every way a walk can end becomes a durable fact and an `Ending`."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from orchestrator import errors
from orchestrator.rollout import custody, transcript
from orchestrator.rollout.runtime import Ending
from orchestrator.rollout.walk import ReleasePending, Superseded, Walk
from orchestrator.states import TERMINAL, State
from store import errors as store_errors
from store import rows

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from orchestrator.rollout.runtime import Runtime
    from store.look import Look

logger = logging.getLogger(__name__)

T = TypeVar("T")

_RELEASE_RETRY_MS, _LONGEST_RELEASE_MS = 15_000, 1_800_000
_CLEANUP_S = 10.0
_STOPPED = {
    "cancelled": "a person asked to cancel the rollout",
    "deadline": "its deadline passed before it was graded",
}
"""Why a walk was stopped -> what its failure says; every other reason means that somebody else owns the rollout."""
_COUNTERS = {
    errors.Budget.CRASH: "crash_count",
    errors.Budget.INFRA: "infra_count",
    errors.Budget.GRADE: "grade_count",
}


UNREADABLE = (ValidationError, store_errors.Damaged, errors.Failure)
"""How it shows that a rollout's stored input cannot be read: no attempt of it will ever go better."""


async def run(runtime: Runtime, rollout_id: str) -> Ending:
    """Walk a submitted rollout, attempt after attempt, until it is terminal or somebody else owns it.

    One that is graded and whose sandbox cannot be proven gone is left: it has its reward, and is released later.
    Cancelling it gives the attempt back or ends the rollout as cancelled (`Runtime.on_cancel`), then re-raises.
    """
    while True:
        leases = await _claimed(runtime, rollout_id)
        ending = await (advance(runtime, leases[0]) if leases else answer(runtime.store, rollout_id))
        if ending.again_in_s is None or ending.state is State.GRADED:
            return ending
        await asyncio.sleep(ending.again_in_s)


async def advance(runtime: Runtime, lease: rows.Lease) -> Ending:
    """Walk one claimed rollout as far as this attempt goes."""
    stopped: list[str] = []
    try:
        walk = await Walk.load(runtime, lease)
    except asyncio.CancelledError:
        await _to_its_end(runtime.store.record(lease, give_back=rows.GiveBack(outcome="interrupted")))
        raise
    except UNREADABLE as e:
        return await _unreadable(runtime, lease, e)
    work = asyncio.create_task(walk.to_the_end(), name=f"rollout-{lease.rollout_id}")

    def stop(why: str) -> None:
        stopped.append(why)
        work.cancel()

    def stop_late() -> None:
        if walk.state is not State.GRADED:  # a reward that is recorded is never lost
            stop("deadline")

    runtime.heartbeat.hold(lease, stop)
    late = None
    if walk.left_s is not None:
        left_s = max(0.0, walk.left_s - walk.settings.limits.release_s)
        late = asyncio.get_running_loop().call_later(left_s, stop_late)
    try:
        return await _outcome_of(walk, work, stopped)
    finally:
        if late is not None:
            late.cancel()
        runtime.heartbeat.drop(lease)
        await _to_its_end(runtime.later(walk.let_go()))


async def _claimed(runtime: Runtime, rollout_id: str) -> list[rows.Lease]:
    """Claim a rollout; a cancelled claim is waited for and given back, for nobody would renew it."""
    claiming = asyncio.ensure_future(runtime.store.claim(limit=1, ids=[rollout_id]))
    try:
        return await asyncio.shield(claiming)
    except asyncio.CancelledError:
        await _to_its_end(_give_back(runtime, claiming))
        raise


async def _give_back(runtime: Runtime, claiming: asyncio.Future[list[rows.Lease]]) -> None:
    for lease in await claiming:
        await runtime.store.record(lease, give_back=rows.GiveBack(outcome="interrupted"))


async def withdraw(runtime: Runtime, rollout_id: str) -> None:
    """Bring a rollout to its end that its caller cancelled and nobody works on; a graded one is released."""
    for lease in await runtime.store.claim(limit=1, ids=[rollout_id], early=True):
        if lease.state == State.GRADED:
            await advance(runtime, lease)
        else:
            cancelled = errors.RolloutCancelled("the caller cancelled the rollout")
            try:
                walk = await Walk.load(runtime, lease)
            except UNREADABLE as e:
                await _unreadable(runtime, lease, e)
            else:
                await _settle(walk, cancelled)


async def _unreadable(runtime: Runtime, lease: rows.Lease, error: Exception) -> Ending:
    """End a rollout whose stored input this program cannot read."""
    why = str(error) if isinstance(error, errors.Failure) else f"its stored task cannot be read: {error}"
    if lease.state == State.GRADED:
        give_back = rows.GiveBack(
            outcome="failed", error_class="internal", error=why, delay_ms=_LONGEST_RELEASE_MS
        )
        await runtime.store.record(lease, give_back=give_back)
    else:
        await runtime.store.transition(
            lease,
            "fail",
            op_id=runtime.new_id(),
            extra=[rows.SandboxReleasing()],
            give_back=rows.GiveBack(outcome="failed", error_class="internal", error=why),
            failure=(errors.FailureClass.INTERNAL.value, why),
        )
        await runtime.later(custody.release_given_up(runtime, lease.rollout_id))
    logger.error("rollout %s: %s", lease.rollout_id, why)
    return await answer(runtime.store, lease.rollout_id)


async def _outcome_of(walk: Walk, work: asyncio.Task[None], stopped: list[str]) -> Ending:
    try:
        await asyncio.wait([work])
    except asyncio.CancelledError:
        work.cancel()
        if walk.runtime.in_background is None:
            await _to_its_end(_ended(work))
        else:  # how long a provider takes to clean up is nothing that the caller has to wait for
            walk.runtime.in_background(_ended(work))
        await _to_its_end(_give_back_or_fail(walk))
        raise
    try:
        work.result()
    except asyncio.CancelledError:
        if stopped and stopped[0] in _STOPPED:
            return await _settle(walk, errors.RolloutCancelled(_STOPPED[stopped[0]]))
    except Superseded as e:
        logger.warning("%s; left to its owner", e)
    except ReleasePending as e:
        return await _left_graded(walk, str(e))
    except (errors.Failure, store_errors.Damaged) as e:
        failure = e if isinstance(e, errors.Failure) else errors.InternalError(str(e), hint=e.hint)
        return await _settle(walk, failure)
    except store_errors.StoreError:
        raise
    except Exception as e:
        logger.exception("rollout %s: unforeseen error", walk.lease.rollout_id)
        return await _settle(walk, errors.InternalError(f"{type(e).__name__}: {e}"))
    return await answer(walk.runtime.store, walk.lease.rollout_id)


async def _ended(work: asyncio.Task[None]) -> None:
    await asyncio.wait([work])
    if not work.cancelled() and (e := work.exception()) is not None:
        logger.info("a cancelled walk ended with %r", e)


async def answer(store: Look, rollout_id: str) -> Ending:
    """Return what the store knows of a rollout."""
    row = await store.history.rollout(rollout_id)
    if row is None:
        raise errors.UsageError(f"there is no rollout {rollout_id}", hint="see `rollouts list`")
    state = State(row["state"])
    rewards = await store.history.of_rollout("rewards", rollout_id)
    waits = state not in TERMINAL and row["lease_owner"] is None
    return Ending(
        rollout_id=rollout_id,
        state=state,
        reward=rewards[0]["reward"] if rewards else None,
        stats=json.loads(rewards[0]["stats"]) if rewards else None,
        failure_class=row["failure_class"],
        message=row["failure_msg"] or "",
        again_in_s=1.0 if waits else None,
    )


async def _left_graded(walk: Walk, why: str) -> Ending:
    """Give back a rollout that has its reward and waits for a release, unless somebody else has it by now."""
    delay_ms = min(_LONGEST_RELEASE_MS, _RELEASE_RETRY_MS * 2 ** min(walk.lease.attempt_no, 10))
    give_back = rows.GiveBack(outcome="failed", error_class="release_pending", error=why, delay_ms=delay_ms)
    try:
        await walk.note(give_back=give_back)
    except Superseded as e:
        logger.warning("%s; left to its owner", e)
        return await answer(walk.runtime.store, walk.lease.rollout_id)
    known = await answer(walk.runtime.store, walk.lease.rollout_id)
    return replace(known, message=why, again_in_s=delay_ms / 1000)


async def _settle(walk: Walk, failure: errors.Failure) -> Ending:
    """Turn a failure into a new attempt while its budget lasts, else into the state failed."""
    try:
        ending = await _to_its_end(_retry_or_fail(walk, failure))
    except Superseded as e:
        logger.warning("%s; left to its owner", e)
        return await answer(walk.runtime.store, walk.lease.rollout_id)
    await _to_its_end(walk.release_given_up())
    return ending


async def _retry_or_fail(walk: Walk, failure: errors.Failure) -> Ending:
    await walk.caught_up()
    if walk.state in TERMINAL:
        return await answer(walk.runtime.store, walk.lease.rollout_id)
    if walk.state is State.GRADED:  # the stop came too late: a recorded reward is never lost
        cancelled = isinstance(failure, errors.RolloutCancelled)
        delay_ms = 0 if cancelled else _RELEASE_RETRY_MS
        await walk.note(give_back=rows.GiveBack(outcome="interrupted", delay_ms=delay_ms))
        if cancelled:
            await walk.runtime.later(withdraw(walk.runtime, walk.lease.rollout_id))
        return await answer(walk.runtime.store, walk.lease.rollout_id)
    rollout_id, budget = walk.lease.rollout_id, failure.budget
    message = str(failure) + (f" ({failure.hint})" if failure.hint else "")
    spent = 0 if budget is None else walk.row[_COUNTERS[budget]]
    delay_s = _backoff_s(walk, spent)
    in_time = walk.left_s is None or delay_s < (
        walk.left_s if walk.state is State.PATCHED else walk.agent_left_s
    )
    may_retry = in_time and await _may_start_again(walk)
    if budget is errors.Budget.INFRA and spent < errors.BUDGETS[budget] and may_retry:
        give_back = rows.GiveBack(
            outcome="failed",
            error_class=failure.failure_class.value,
            error=message,
            delay_ms=round(delay_s * 1000),
            spend=budget.value,
        )
        await _new_attempt(walk, failure, give_back)
        logger.warning("rollout %s: %s; next attempt in %.1f s", rollout_id, message, delay_s)
        return Ending(rollout_id=rollout_id, state=walk.state, message=message, again_in_s=delay_s)
    await walk.move(
        "fail",
        payload={"failure_class": failure.failure_class.value, "budget": budget.value if budget else None},
        extra=[rows.SandboxReleasing()],
        give_back=rows.GiveBack(outcome="failed", error_class=failure.failure_class.value, error=message),
        failure=(failure.failure_class.value, message),
    )
    logger.warning(
        "rollout %s (%s) failed: %s: %s",
        rollout_id,
        walk.row["instance_id"],
        failure.failure_class.value,
        message,
    )
    return Ending(
        rollout_id=rollout_id, state=walk.state, failure_class=failure.failure_class.value, message=message
    )


async def _may_start_again(walk: Walk) -> bool:
    """Say whether another attempt may be made: one that asks the model only if the caller's session was not asked yet."""
    if walk.row["endpoint_kind"] == "stateless" or walk.state is not State.AGENT_RUNNING:
        return True
    return not await transcript.has_asked(walk.runtime.store.history, walk.lease.rollout_id)


async def _new_attempt(walk: Walk, failure: errors.Failure, give_back: rows.GiveBack) -> None:
    if walk.state in (State.SANDBOX_READY, State.AGENT_RUNNING):
        await walk.move(
            "restart",
            payload={"failure_class": failure.failure_class.value},
            extra=[rows.SandboxReleasing()],
            give_back=give_back,
        )
    else:
        await walk.note([rows.SandboxReleasing()], give_back=give_back)


def _backoff_s(walk: Walk, spent: int) -> float:
    retry = walk.settings.retry
    full: float = min(retry.backoff_cap_s, retry.backoff_base_s * 2**spent)
    return full * (0.5 + walk.runtime.random() / 2)


async def _give_back_or_fail(walk: Walk) -> None:
    """Leave a store that a later claim understands, because the caller cancelled.

    A caller who waits for it does so for a bounded time; where nobody has to wait, the store's own patience is the bound.
    """
    try:
        async with asyncio.timeout(_CLEANUP_S if walk.runtime.in_background is None else None):
            await walk.caught_up()
            if walk.runtime.on_cancel == "fail":
                await _retry_or_fail(walk, errors.RolloutCancelled("the caller cancelled the rollout"))
            elif walk.state not in TERMINAL:
                await walk.note([rows.SandboxReleasing()], give_back=rows.GiveBack(outcome="interrupted"))
            await walk.runtime.later(_clean_up(walk))
    except TimeoutError:
        logger.warning(
            "rollout %s: clean-up did not finish; its ledger rows stay open", walk.lease.rollout_id
        )
    except (Superseded, errors.Failure, store_errors.StoreError) as e:
        logger.warning("rollout %s: left as it is: %s", walk.lease.rollout_id, e)


async def _clean_up(walk: Walk) -> None:
    await walk.let_go()
    await custody.release_given_up(walk.runtime, walk.lease.rollout_id)


async def _to_its_end(coroutine: Coroutine[Any, Any, T]) -> T:
    """Finish a last write although the caller is cancelled meanwhile, then let the cancellation through.

    A store that does not answer holds it up no longer than a clean-up may take; what it did is read by the next owner.
    """
    task = asyncio.create_task(coroutine)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task], timeout=_CLEANUP_S)
        task.cancel()
        raise
