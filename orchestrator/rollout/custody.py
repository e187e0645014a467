"""Sandboxes under the ledger: written down before they are made, closed only with the provider's proof."""

from __future__ import annotations

import logging
import uuid
from contextlib import asynccontextmanager
from enum import Enum, auto
from typing import TYPE_CHECKING

from orchestrator import errors, identity
from orchestrator.sandbox.base import Limits, Role, SandboxSpec
from orchestrator.steps import created, graded
from store import failpoints, rows

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection

    from orchestrator.rollout.runtime import Runtime
    from orchestrator.sandbox.base import Sandbox, SandboxProvider
    from orchestrator.settings import Settings
    from orchestrator.tasks.record import Task
    from store.history import Record
    from store.rollouts import Store

logger = logging.getLogger(__name__)

_RELEASE_MARGIN_S = 900


class Release(Enum):
    """What came of removing a sandbox."""

    CLOSED = auto()
    """It is gone, and its ledger row was closed with that proof."""
    WAS_CLOSED = auto()
    """It is gone, and somebody else had closed its row by then."""
    OPEN = auto()
    """It is not proven gone; its row says why."""


def spec_of(key: str, role: Role, task: Task, settings: Settings, *, fence: int = 0) -> SandboxSpec:
    """Describe a sandbox; its time to live covers start-up, agent, grading and a margin."""
    box = settings.sandbox
    budget = box.create_timeout_s + settings.agent.timeout_s + settings.grading.extract_timeout_s
    budget += settings.grading.timeout_s or task.timeout_s
    return SandboxSpec(
        key=key,
        role=role,
        task=task,
        fence=fence,
        limits=Limits(memory_mb=box.memory_mb, processes=box.processes, file_mb=box.file_mb),
        ttl_s=round(budget) + _RELEASE_MARGIN_S,
        create_timeout_s=box.create_timeout_s,
    )


def intent_of(runtime: Runtime, spec: SandboxSpec) -> rows.SandboxIntent:
    """Return the ledger row that must be durable before the create call goes out."""
    return _intent(runtime.provider, spec)


def _intent(provider: SandboxProvider, spec: SandboxSpec) -> rows.SandboxIntent:
    return rows.SandboxIntent(
        key=spec.key,
        role=spec.role.value,
        provider=provider.name,
        provider_ref=provider.ref,
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
    return spec_of(key, role, task, settings, fence=lease.fence)


async def make(runtime: Runtime, spec: SandboxSpec) -> Sandbox:
    """Make the sandbox whose intent is durable."""
    return await _make(runtime.provider, spec)


async def _make(provider: SandboxProvider, spec: SandboxSpec) -> Sandbox:
    failpoints.hit("sandbox.before_create")
    sandbox = await created.make_sandbox(provider, spec)
    failpoints.hit("sandbox.after_create")
    return sandbox


async def release_given_up(runtime: Runtime, rollout_id: str) -> list[str]:
    """Remove every sandbox of the rollout that is marked `releasing`; return the keys that could not be proven gone.

    Needs no lease: the ledger lets only proof close a row.
    """
    store, provider = runtime.store, runtime.provider
    return [
        row["key"]
        for row in await store.history.of_rollout("sandboxes", rollout_id)
        if row["status"] == "releasing" and await release(store, provider, row) is Release.OPEN
    ]


async def still_kept(runtime: Runtime, rollout_id: str) -> bool:
    """Say whether a sandbox of the rollout is not given up yet."""
    boxes = await runtime.store.history.of_rollout("sandboxes", rollout_id)
    return any(row["status"] in ("intent", "live") for row in boxes)


async def discard(runtime: Runtime, key: str) -> None:
    """Remove a sandbox that this process made and nobody wants; what does not succeed is left to `clean`."""
    try:
        await graded.release(runtime.provider, key, runtime.provider.ref)
    except errors.Failure as e:
        logger.warning("sandbox %s is not wanted and could not be removed: %s", key, e)


async def release(store: Store, provider: SandboxProvider, row: Record) -> Release:
    """Remove a sandbox at the authority its ledger row names and close the row; without proof the row gets a note.

    What was never seen to live is `lost` once its create call cannot take effect any more and the provider has nothing.
    """
    key, ref = row["key"], row["provider_ref"]
    unsure = provider.creates_late and row["live_at"] is None
    found: list[str] = row["provider_ids"] or []
    try:
        failpoints.hit("sandbox.before_release")
        late = unsure and row["create_deadline"] > await store.history.now()
        if unsure:
            found = [*dict.fromkeys([*found, *await graded.listed(provider, key, ref)])]
        proof = await graded.release(provider, key, ref)
        failpoints.hit("sandbox.after_release")
        if late:
            raise errors.SandboxLost(f"its create call may take effect until {row['create_deadline']}")
    except errors.Failure as e:
        logger.warning("sandbox %s is not released yet: %s", key, e)
        await store.note_failed_release(key, str(e), found)
        return Release.OPEN
    nothing = unsure and not found
    proof = f"nothing was ever made; {proof}" if nothing else proof
    closed = await store.close_sandbox(key, proof, lost=nothing)
    return Release.CLOSED if closed else Release.WAS_CLOSED


def key_without_rollout(store: Store, ordinal: int) -> str:
    """Return the key of a sandbox that belongs to no rollout: it names this worker; `ordinal` is used only once."""
    return identity.sandbox_key(store.uuid, store.worker.worker_id, 0, ordinal)


def owner_of(key: str) -> str | None:
    """Return the worker id in a key that `key_without_rollout` made."""
    if not identity.is_sandbox_key(key):
        return None
    return str(uuid.UUID(key.split("-")[2]))


@asynccontextmanager
async def without_rollout(
    store: Store, provider: SandboxProvider, spec: SandboxSpec
) -> AsyncIterator[Sandbox]:
    """Make a sandbox that belongs to no rollout, written down first, and remove it whatever happens.

    What this process does not live to remove, `sweep_abandoned` finds.
    """
    intent = _intent(provider, spec)
    try:
        await store.declare_sandbox(intent)
        sandbox = await _make(provider, spec)
        try:
            await store.note_live_sandbox(live_of(sandbox))
            yield sandbox
        finally:
            await sandbox.detach()
    finally:
        try:
            await store.give_up_sandbox(spec.key)
        finally:
            await _release_open(store, provider, {spec.key})


async def sweep_abandoned(store: Store, provider: SandboxProvider) -> int:
    """Remove the sandboxes without a rollout whose worker is gone; return how many this call proved gone."""
    abandoned = await store.give_up_abandoned(owner_of)
    return await _release_open(store, provider, {key for key, _ in abandoned})


async def _release_open(store: Store, provider: SandboxProvider, keys: Collection[str]) -> int:
    """Release those of the open ledger rows; return how many this call proved gone."""
    wanted = [row for row in await store.history.open_sandboxes() if row["key"] in keys]
    return [await release(store, provider, row) for row in wanted].count(Release.CLOSED)
