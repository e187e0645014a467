"""From a task and settings to a submitted rollout with an identity."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from orchestrator import errors, identity, states
from store import rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.rollout.runtime import Runtime
    from orchestrator.settings import Settings
    from orchestrator.tasks.record import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One sample of one task."""

    task: Task
    settings: Settings
    run_id: str
    sample: int = 0
    retry_no: int = 0
    parent_id: str | None = None
    endpoint_kind: Literal["stateless", "session"] = "stateless"
    """`session`: the model answers only for the caller that is here, and its key is kept in memory only."""
    origin: dict[str, str] = field(default_factory=dict)
    """Where it was asked for, for whoever resumes it: `user`, `replay` (a file), `key` (a variable that was set),
    `worker` (the process of a session's caller)."""
    group: str | None = None
    """Samples that a trainer compares with each other; default: those of one task in a run."""
    session_ref: str | None = None
    """sha256 of the caller's key."""
    policy_version: str | None = None
    waited_s: float = 0.0
    """How long its caller has waited already: the deadline counts from the call."""
    key: str | None = None
    """The caller's own identity for this rollout; default: run, task, sample and retry."""


async def submit(runtime: Runtime, requests: Sequence[Request]) -> list[tuple[str, bool]]:
    """Store rollouts, all or none; return (id, is new) in order.

    A request whose key exists attaches to that rollout; raises `store.errors.Conflict` when it asks for something else.
    """
    ids = [runtime.new_id() for _ in requests]
    # Digests of large records, or of many, would hold up the event loop.
    new = await asyncio.to_thread(lambda: [_row(*each) for each in zip(ids, requests, strict=True)])
    return await runtime.store.submit(new)


def _row(rollout_id: str, request: Request) -> rows.NewRollout:
    task, settings = request.task, request.settings
    digest = task.sha256
    source = task.repo_source
    return rows.NewRollout(
        id=rollout_id,
        idem_key=request.key
        or identity.batch_key(request.run_id, task.instance_id, digest, request.sample, request.retry_no),
        request_sha256=identity.request_sha256(digest, settings.to_json(), request.endpoint_kind),
        run_id=request.run_id,
        group_id=request.group or f"{request.run_id}/{task.instance_id}",
        session_ref=request.session_ref,
        policy_version=request.policy_version,
        deadline_ms=_deadline_ms(request),
        sample=request.sample,
        retry_no=request.retry_no,
        parent_id=request.parent_id,
        relation=None if request.parent_id is None else "retry",
        instance_id=task.instance_id,
        task_sha256=digest,
        task_json=task.to_json(),
        dataset_kind=task.dataset_kind.value,
        eval_sha256=task.eval_sha256,
        agent_type=settings.agent.type,
        config_sha256=settings.sha256,
        endpoint_kind=request.endpoint_kind,
        input={
            "settings": settings.model_dump(mode="json"),
            "origin": request.origin,
            "repo_source": None if source is None else source.model_dump(mode="json"),
        },
        fsm_version=states.FSM_VERSION,
        outcome_table=errors.OUTCOME_TABLE_VERSION,
    )


def _deadline_ms(request: Request) -> int | None:
    deadline_s = request.settings.limits.deadline_s
    return None if deadline_s is None else round((deadline_s - request.waited_s) * 1000)
