"""From one call of a trainer to its answer; nothing but cancellation leaves as an exception.

AReaL would train on any other exception as a reward of 0.0.
"""

from __future__ import annotations

import asyncio
import copy
import getpass
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import SecretStr

from orchestrator import assembly, errors, provenance, rollout, settings
from orchestrator.agents.base import Endpoint
from orchestrator.entry import episode, shared, trainer
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
from orchestrator.rollout import Request
from orchestrator.states import TERMINAL

if TYPE_CHECKING:
    from orchestrator.entry.call import Call
    from orchestrator.entry.shared import Shared
    from orchestrator.rollout import Ending, Runtime
    from orchestrator.settings import Settings

logger = logging.getLogger(__name__)

_RECORDED_S = 10.0
"""How long a cancelled call waits at most for its end to be written down."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a call is handed."""

    reward: float | None
    """None: there is no reward, and the sample must be dropped."""
    stats: dict[str, Any] = field(default_factory=dict)
    why: str = ""
    """Without a reward: what happened, to which rollout, and what to do."""
    rollout_id: str | None = None


async def answer(data: object, call: Call) -> Answer:
    """Run one record; raises only `asyncio.CancelledError`."""
    watch = shared.of_this_loop().watch
    chosen: Settings | None = None
    try:
        if not isinstance(data, Mapping):
            raise errors.RecordRefused(f"a record is a mapping, not {type(data).__name__}")
        record = copy.deepcopy(dict(data))
        chosen = settings_of(call, record)
        refuse_absent_agent(chosen.agent.type)
        found = await _answered(record, call, chosen)
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
    trainer.publish(
        {**found.stats, "infra_drop_rate": float(found.reward is None and not found.stats.get("mask_sample"))}
    )
    if chosen is not None:
        watch.end_if_hopeless(chosen.training)
    return found


async def _answered(record: dict[str, Any], call: Call, chosen: Settings) -> Answer:
    began_s = time.monotonic()
    task = await asyncio.to_thread(task_of, record)
    opened = await shared.opened(_database_url())
    runtime = await opened.runtime(chosen)
    place = trainer.context()
    request = Request(
        task=task,
        settings=chosen,
        run_id=opened.run_id,
        sample=place.sample or 0,
        group=None if place.task_id is None else f"{opened.run_id}/{place.task_id}",
        endpoint_kind="session",
        session_ref=identity_of(key_of(call, record)),
        policy_version=place.policy_version,
        origin={"user": getpass.getuser(), "worker": runtime.store.worker.worker_id}
        | {
            name: str(value)
            for name, value in (("task_id", place.task_id), ("is_eval", int(place.is_eval)))
            if value is not None
        },
        key=identity(call, record) or runtime.new_id(),
        waited_s=time.monotonic() - began_s,
    )
    submitting = asyncio.ensure_future(rollout.submit(runtime, [request]))
    try:
        ((rollout_id, is_new),) = await asyncio.shield(submitting)
    except asyncio.CancelledError:
        opened.do_later(_withdrawn(runtime, submitting))
        raise
    endpoint = Endpoint(
        base_url=chosen.llm.base_url or "",
        model=chosen.llm.model,
        api_key=SecretStr(key_of(call, record) or "EMPTY"),
    )
    handed = rollout.Handover(runtime, rollout_id, request)
    try:
        known = None if is_new else await rollout.answer(runtime.store, rollout_id)
        if known is not None and (known.state in TERMINAL or known.stats is not None):
            ending = known
        else:
            ending = await opened.walk(runtime, rollout_id, endpoint)
    except asyncio.CancelledError:
        ended = opened.do_later(_cancelled(opened, rollout_id, handed))
        await asyncio.wait([ended], timeout=_RECORDED_S)
        raise
    found = _of(ending)
    await handed.note(found.reward)
    watch = shared.of_this_loop().watch
    if ending.failure_class is None:
        watch.valid()
    else:
        watch.dropped(ending.failure_class, f"rollout {rollout_id}: {ending.message}")
    if chosen.training.episode_logs:
        opened.do_later(_logs(runtime, rollout_id, call.result_dir or settings.variable("LOG_DIR", "./logs")))
    return found


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


async def _withdrawn(runtime: Runtime, submitting: asyncio.Future[list[tuple[str, bool]]]) -> None:
    for rollout_id, is_new in await submitting:
        if is_new:
            await rollout.withdraw(runtime, rollout_id)


async def _logs(runtime: Runtime, rollout_id: str, log_dir: str) -> None:
    found = await provenance.gather_documents(runtime.store.history, rollout_id)
    if found is not None:
        await episode.write(found, rollout_id, log_dir)


async def _cancelled(opened: Shared, rollout_id: str, handed: rollout.Handover) -> None:
    await opened.stopped(rollout_id)
    await handed.note(exception="CancelledError")


def _database_url() -> str:
    url, why = settings.entry_database_url()
    if why:
        say_once(f"rollouts of this process are stored in {url}: {why}")
    return url
