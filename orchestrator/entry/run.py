"""From one call of a trainer to its answer; nothing but cancellation leaves as an exception.

AReaL would train on any other exception as a reward of 0.0.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pydantic import SecretStr

from orchestrator import assembly, errors, provenance, rollout, settings
from orchestrator.agents.base import Endpoint
from orchestrator.entry import episode, loading, shared, trainer
from orchestrator.entry.request import (
    identity,
    identity_of,
    key_of,
    refuse_absent_agent,
    say_once,
    settings_of,
    task_of,
)
from orchestrator.entry.watch import PreflightFailed
from orchestrator.identity import user
from orchestrator.rollout import Request
from orchestrator.states import TERMINAL, State

if TYPE_CHECKING:
    from orchestrator.entry.call import Call
    from orchestrator.entry.shared import Shared
    from orchestrator.entry.watch import Watch
    from orchestrator.rollout import Ending, Runtime
    from orchestrator.settings import Settings
    from orchestrator.tasks.record import Task

logger = logging.getLogger(__name__)

_RECORDED_S = 0.5
"""How long a cancelled call waits at most for its end to be written down; after that it is written down beside it."""
_LATE_S = 0.3
"""So long after its deadline a call is answered whatever the store does."""
_LOGS_S = 5.0
"""How long an answer waits at most for its files: an event loop that ends with it would take the writing along."""
_AGAIN_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a call is handed."""

    reward: float | None
    """None: there is no reward, and the sample must be dropped."""
    stats: dict[str, Any] = field(default_factory=dict)
    why: str = ""
    """Without a reward: what happened, to which rollout, and what to do."""
    rollout_id: str | None = None
    is_new: bool = True
    """False when it was stored already: its numbers were published then."""


async def answer(data: object, call: Call) -> Answer:
    """Run one record; raises only `asyncio.CancelledError`."""
    watch = shared.of_this_loop().watch
    chosen: Settings | None = None
    try:
        if not isinstance(data, Mapping):
            raise errors.RecordRefused(f"a record is a mapping, not {type(data).__name__}")
        began_s = time.monotonic()
        record = await asyncio.to_thread(copy.deepcopy, dict(data))  # which takes long for some
        chosen = settings_of(call, record)
        refuse_absent_agent(chosen.agent.type)
        found = await _in_time(record, call, chosen, began_s)
    except PreflightFailed as e:
        found = Answer(reward=None, why=f"{e} ({e.hint})" if e.hint else str(e))
        watch.dropped("preflight", str(e), e.hint, systemic=True)
    except (errors.RolloutsError, assembly.StoreError) as e:
        found = Answer(reward=None, why=f"{e} ({e.hint})" if e.hint else str(e))
        watch.dropped(type(e).__name__, str(e), e.hint)
    except Exception as e:
        logger.exception("a rollout could not be run")
        found = Answer(reward=None, why=f"unforeseen: {type(e).__name__}")
        watch.dropped(type(e).__name__, f"{type(e).__name__} (see the log)")
    if found.reward is None:
        instance = data.get("instance_id", "unknown") if isinstance(data, Mapping) else "unknown"
        logger.error("%s: no reward: %s", instance, found.why)
    if found.is_new:
        dropped = found.reward is None and not found.stats.get("mask_sample")
        trainer.publish({**found.stats, "infra_drop_rate": float(dropped)})
    if chosen is not None:
        watch.end_if_hopeless(chosen.training)
    return found


async def _in_time(record: dict[str, Any], call: Call, chosen: Settings, began_s: float) -> Answer:
    """Answer by the deadline even where the store does not: what came of the rollout is then written down later."""
    deadline_s = chosen.limits.deadline_s
    limit_s = None if deadline_s is None else max(0.0, deadline_s + _LATE_S - (time.monotonic() - began_s))
    try:
        async with asyncio.timeout(limit_s):
            return await _answered(record, call, chosen, began_s)
    except TimeoutError as e:
        raise errors.RolloutCancelled(
            f"its deadline of {deadline_s:g} s is over, and the store or the sandbox provider did not answer in time",
            hint="see whether they answer: `rollouts doctor`",
        ) from e


async def _answered(record: dict[str, Any], call: Call, chosen: Settings, began_s: float) -> Answer:
    task = await asyncio.to_thread(task_of, record)
    if chosen.training.freeze_gc:
        loading.freeze("before the store is opened, which may take a while")
    else:
        loading.thaw()
    opened = await shared.opened(_database_url())
    runtime = await opened.runtime(chosen)
    if chosen.training.freeze_gc:
        loading.freeze("before the first rollout")
    request = _request(call, record, task, chosen, opened)
    request = replace(request, waited_s=time.monotonic() - began_s)
    submitting = asyncio.ensure_future(rollout.submit(runtime, [request]))
    try:
        ((rollout_id, is_new),) = await asyncio.shield(submitting)
    except asyncio.CancelledError:
        opened.do_later(_withdrawn(opened, runtime, request, submitting))
        raise
    endpoint = Endpoint(
        base_url=chosen.llm.base_url or "",
        model=chosen.llm.model,
        api_key=SecretStr(key_of(call, record) or "EMPTY"),
    )
    handed = rollout.Handover(runtime, rollout_id, request)
    until_s = began_s + (chosen.limits.deadline_s or math.inf)
    try:
        known = None if is_new else await rollout.answer(runtime.store, rollout_id)
        stored = known is not None and (known.state in TERMINAL or known.stats is not None)
        if known is not None and stored:
            ending = known
        else:
            ending = await opened.walk(runtime, rollout_id, endpoint, until_s=until_s)
        found = replace(_of(ending), is_new=not stored)
        if chosen.training.episode_logs:
            folder = call.result_dir or settings.variable("LOG_DIR", "./logs")
            writing = opened.do_later(_logs(runtime, rollout_id, folder))
            await asyncio.wait([writing], timeout=max(0.0, min(_LOGS_S, until_s - time.monotonic())))
        await handed.note(found.reward)
    except asyncio.CancelledError:
        ended = opened.do_later(_cancelled(opened, runtime, rollout_id, handed, is_ours=is_new))
        await asyncio.wait([ended], timeout=_RECORDED_S)
        raise
    if not stored:
        _tell(shared.of_this_loop().watch, ending, rollout_id)
    return found


def _request(call: Call, record: Mapping[str, Any], task: Task, chosen: Settings, opened: Shared) -> Request:
    place, worker_id = trainer.context(), opened.worker.store.worker.worker_id
    kind = "eval/" if place.is_eval else ""
    said = {"task_id": place.task_id, "is_eval": int(place.is_eval)}
    return Request(
        task=task,
        settings=chosen,
        run_id=opened.run_id,
        sample=place.sample or 0,
        group=None if place.task_id is None else f"{opened.run_id}/{kind}{place.task_id}",
        endpoint_kind="session",
        session_ref=identity_of(key_of(call, record)),
        policy_version=place.policy_version,
        origin={"user": user(), "worker": worker_id}
        | {name: str(value) for name, value in said.items() if value is not None},
        key=identity(call, record) or assembly.new_id(),
    )


def _tell(watch: Watch, ending: Ending, rollout_id: str) -> None:
    """Count an ending; a masked one is no reward either, unless the settings or the deadline wanted it so."""
    if ending.reward is not None:
        watch.valid()
    elif ending.failure_class is not None:
        watch.dropped(ending.failure_class, f"rollout {rollout_id}: {ending.message}")
    elif (ending.stats or {}).get("exit_reason") != errors.ExitReason.WALL_TIME:
        outcome = (ending.stats or {}).get("grade_outcome")
        watch.dropped(f"masked:{outcome}", f"rollout {rollout_id}: the task itself is in doubt ({outcome})")


def _of(ending: Ending) -> Answer:
    if ending.reward is not None:
        return Answer(reward=float(ending.reward), stats=ending.stats or {}, rollout_id=ending.rollout_id)
    why = ending.failure_class or "its sample is masked"
    return Answer(
        reward=None,
        stats=ending.stats or provenance.stats_of_failure(ending.failure_class),
        why=f"rollout {ending.rollout_id}: {why} {ending.message}".rstrip()
        + f"; see `rollouts show {ending.rollout_id}`",
        rollout_id=ending.rollout_id,
    )


async def _withdrawn(
    opened: Shared,
    runtime: Runtime,
    request: Request,
    submitting: asyncio.Future[list[tuple[str, bool]]],
) -> None:
    """End a rollout whose caller was cancelled while it was being submitted."""
    for rollout_id, is_new in await submitting:
        if is_new:
            handed = rollout.Handover(runtime, rollout_id, request)
            await _cancelled(opened, runtime, rollout_id, handed, is_ours=True)


async def _cancelled(
    opened: Shared, runtime: Runtime, rollout_id: str, handed: rollout.Handover, *, is_ours: bool
) -> None:
    """Write down that a cancelled caller got nothing; a rollout that nobody waits for any more comes to its end."""
    if await opened.stopped(rollout_id) and is_ours:
        await _ended(runtime, rollout_id)
    await handed.withdrawn("CancelledError")


async def _ended(runtime: Runtime, rollout_id: str) -> None:
    """Bring a rollout to its end that nobody waits for; where the store was away for too long, its lease lapses first."""
    own = runtime.store.worker.worker_id
    while True:
        try:
            await rollout.withdraw(runtime, rollout_id)
            row = await runtime.store.history.rollout(rollout_id)
            if (
                row is None
                or row["state"] in (*TERMINAL, State.GRADED)
                or row["lease_owner"] not in (None, own)
            ):
                return
        except assembly.StoreError as e:
            logger.warning("rollout %s: its end is not written down yet: %s", rollout_id, e)
        await asyncio.sleep(_AGAIN_S)


async def _logs(runtime: Runtime, rollout_id: str, log_dir: str) -> None:
    try:
        found = await provenance.gather_documents(runtime.store.history, rollout_id)
        if found is not None:
            await episode.write(found, rollout_id, log_dir)
    except (OSError, assembly.StoreError) as e:
        logger.warning("rollout %s: its files are not written to %s: %s", rollout_id, log_dir, e)


def _database_url() -> str:
    url, why = settings.entry_database_url()
    if why:
        say_once(f"rollouts of this process are stored in {url}: {why}")
    return url
