"""Sandboxes under the ledger: written down before they are made, closed only with the provider's proof."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from orchestrator import errors, identity
from orchestrator.sandbox.base import Limits, Role, SandboxSpec
from orchestrator.steps import created, graded
from store import failpoints, rows

if TYPE_CHECKING:
    from orchestrator.rollout.runtime import Runtime
    from orchestrator.sandbox.base import Sandbox
    from orchestrator.settings import Settings
    from orchestrator.tasks.record import Task

logger = logging.getLogger(__name__)

_RELEASE_MARGIN_S = 900


def spec_of(key: str, role: Role, task: Task, settings: Settings) -> SandboxSpec:
    """Describe a sandbox; its time to live covers start-up, agent, grading and a margin."""
    box = settings.sandbox
    budget = box.create_timeout_s + settings.agent.timeout_s + settings.grading.extract_timeout_s
    budget += settings.grading.timeout_s or task.timeout_s
    return SandboxSpec(
        key=key,
        role=role,
        task=task,
        limits=Limits(memory_mb=box.memory_mb, processes=box.processes, file_mb=box.file_mb),
        ttl_s=round(budget) + _RELEASE_MARGIN_S,
        create_timeout_s=box.create_timeout_s,
    )


def intent_of(runtime: Runtime, spec: SandboxSpec) -> rows.SandboxIntent:
    """Return the ledger row that must be durable before the create call goes out."""
    return rows.SandboxIntent(
        key=spec.key,
        role=spec.role.value,
        provider=runtime.provider.name,
        provider_ref=runtime.provider.ref,
        env_name=spec.task.image,
        ttl_s=spec.ttl_s,
        create_timeout_s=spec.create_timeout_s,
    )


def live_of(sandbox: Sandbox) -> rows.SandboxLive:
    """Return the ledger row of a create call that succeeded."""
    return rows.SandboxLive(
        key=sandbox.key, provider_ids=[sandbox.provider_id], isolation=sandbox.isolation.value
    )


async def next_spec(
    runtime: Runtime, lease: rows.Lease, role: Role, task: Task, settings: Settings
) -> SandboxSpec:
    """Describe the next sandbox of this lease under a key nobody has used."""
    ordinal = await runtime.store.next_sandbox_ordinal(lease)
    key = identity.sandbox_key(runtime.store.uuid, lease.rollout_id, lease.fence, ordinal)
    return spec_of(key, role, task, settings)


async def make(runtime: Runtime, spec: SandboxSpec) -> Sandbox:
    """Make the sandbox whose intent is durable."""
    failpoints.hit("sandbox.before_create")
    sandbox = await created.make_sandbox(runtime.provider, spec)
    failpoints.hit("sandbox.after_create")
    return sandbox


async def release_given_up(runtime: Runtime, rollout_id: str) -> list[str]:
    """Remove every sandbox of the rollout that is marked `releasing`; return the keys that could not be proven gone.

    Needs no lease: the ledger lets only proof close a row.
    """
    left = []
    for row in await runtime.store.history.of_rollout("sandboxes", rollout_id):
        if row["status"] != "releasing":
            continue
        try:
            failpoints.hit("sandbox.before_release")
            proof = await graded.release(runtime.provider, row["key"], row["provider_ref"])
            failpoints.hit("sandbox.after_release")
        except errors.Failure as e:
            logger.warning("rollout %s: sandbox %s is not released yet: %s", rollout_id, row["key"], e)
            await runtime.store.note_failed_release(row["key"], str(e))
            left.append(row["key"])
        else:
            await runtime.store.close_sandbox(row["key"], proof)
    return left
