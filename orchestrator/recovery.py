"""After a crash: remove the sandboxes of everybody who is gone, and prove it; prepare their rollouts to be claimed.

Safe beside live workers and beside itself: every mark asks the row again, and only the authority that made a sandbox
can say that it is gone.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from orchestrator import errors, identity, rollout
from orchestrator.rollout import custody
from orchestrator.steps import graded
from store import errors as store_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine

    from orchestrator.rollout import Runtime
    from orchestrator.sandbox.base import SandboxProvider
    from store.history import Record
    from store.look import Look
    from store.rollouts import Store
    from store.rows import Lease

    ProviderOf = Callable[[str], SandboxProvider]

logger = logging.getLogger(__name__)

_AT_ONCE = 16
_LIST_S = 60.0
_RETRY_S, _RETRY_CAP_S = 15.0, 900.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Swept:
    """What became of one sandbox."""

    key: str
    rollout_id: str | None
    provider_ref: str
    outcome: str
    """removed | gone (somebody else removed it meanwhile) | would remove | kept (its owner lives) | open (not proven
    gone) | stray (known to no open row, and not proven gone)"""
    detail: str = ""


@dataclass(kw_only=True, slots=True)
class Cleaned:
    """What one sweep did."""

    swept: list[Swept] = field(default_factory=list)
    unknown: dict[str, str] = field(default_factory=dict)
    """Authority -> why it could not be asked: nothing is known about its sandboxes."""
    resumable: int = 0
    """Unfinished rollouts that nobody has."""

    @property
    def clean(self) -> bool:
        """True when nothing remains that has no live owner, and every authority that counts was asked."""
        return not self.unknown and all(s.outcome in ("removed", "gone", "kept") for s in self.swept)

    @property
    def counts(self) -> str:
        """How many sandboxes came to what, for a person."""
        count = [s.outcome for s in self.swept].count
        elsewhere = f"{count('gone')} by somebody else meanwhile, " if count("gone") else ""
        return (
            f"{count('removed')} sandboxes removed, {elsewhere}{count('kept')} belong to live workers, "
            f"{count('open') + count('stray')} not proven gone"
        )


async def clean(
    store: Store,
    provider_of: ProviderOf,
    *,
    every: bool = False,
    also: Collection[tuple[str, str]] = (),
    limit_s: float = 540.0,
) -> Cleaned:
    """Release everything whose owner is gone, then remove what the providers list under our keys without an owner.

    `provider_of` maps a provider's name to one that can list and release; `also` names authorities (provider, ref) to ask
    that the store may have forgotten, as one restored from a backup has. With `every`, an authority that does not
    answer counts although no row of it is open. Within `limit_s` seconds, oldest first.
    """
    done = Cleaned()
    loop = asyncio.get_running_loop()
    until = loop.time() + limit_s
    listed = await _listed(store, provider_of, done, also, every=every)
    await store.take_from_dead()
    await store.give_up_ownerless()
    abandoned = {key for key, _ in await store.give_up_abandoned(custody.owner_of)}
    ownerless, strays = await _sorted_out(store, done, listed, abandoned)
    places = asyncio.Semaphore(_AT_ONCE)

    async def one(row: Record) -> Swept:
        async with places:
            return await _released(store, provider_of, row, until - loop.time())

    async def stray(key: str, ref: str) -> list[Swept]:
        async with places:
            return await _removed(listed[key, ref], key, ref, until - loop.time())

    done.swept += await asyncio.gather(*(one(row) for row in ownerless))
    for swept in await asyncio.gather(*(stray(key, ref) for key, ref in strays)):
        done.swept += swept
    done.resumable = sum(not row["held"] for row in await store.history.unfinished())
    return done


async def would_clean(
    store: Look,
    provider_of: ProviderOf,
    *,
    every: bool = False,
    also: Collection[tuple[str, str]] = (),
) -> Cleaned:
    """Say what `clean` would do with each sandbox, as far as can be told, and change nothing."""
    done = Cleaned()
    listed = await _listed(store, provider_of, done, also, every=every)
    ownerless, strays = await _sorted_out(store, done, listed, ())
    done.swept += [
        _swept(row, "open", f"{row['provider_ref']} could not be asked")
        if row["provider_ref"] in done.unknown
        else _swept(row, "would remove", row["status"])
        for row in ownerless
    ]
    done.swept += [_stray(key, ref, "would remove", "no open row of the store") for key, ref in strays]
    return done


async def _sorted_out(
    store: Look, done: Cleaned, listed: dict[tuple[str, str], SandboxProvider], abandoned: Collection[str]
) -> tuple[list[Record], list[tuple[str, str]]]:
    """Note what is kept for its owner; return the rows without one, and the instances without a row."""
    rows = await store.history.open_sandboxes()
    ownerless = [row for row in rows if row["key"] in abandoned or not await _has_owner(store, row)]
    keys = {row["key"] for row in ownerless}
    done.swept += [_swept(row, "kept", "its owner lives") for row in rows if row["key"] not in keys]
    return ownerless, _strays(listed, {row["key"] for row in rows})


async def _listed(
    store: Look,
    provider_of: ProviderOf,
    done: Cleaned,
    also: Collection[tuple[str, str]],
    *,
    every: bool,
) -> dict[tuple[str, str], SandboxProvider]:
    """Ask every authority for the instances under our keys, before the rows are read: an instance has a row by then.

    One that does not answer counts as unknown when the store has open rows of it, or with `every`.
    """
    prefix = identity.sandbox_prefix(store.uuid)
    counts = {(row["provider"], row["provider_ref"]) for row in await store.history.open_sandboxes()}
    known = await store.history.authorities()
    never = await store.history.written_off() if every else set()
    found: dict[tuple[str, str], SandboxProvider] = {}

    async def ask(name: str, ref: str) -> None:
        try:
            provider = provider_of(name)
            async with asyncio.timeout(_LIST_S):
                for instance in await provider.list_ours(prefix, ref):
                    found[instance.key, ref] = provider
        except (errors.Failure, errors.UsageError, TimeoutError) as e:
            logger.info("%s cannot be listed: %s", ref, e)
            expected = every and (name, ref) in known and ref not in never
            if expected or (name, ref) in counts:
                done.unknown[ref] = str(e) or type(e).__name__

    await asyncio.gather(*(ask(name, ref) for name, ref in dict.fromkeys([*known, *also])))
    return found


def _strays(listed: dict[tuple[str, str], SandboxProvider], known: set[str]) -> list[tuple[str, str]]:
    return [(key, ref) for key, ref in listed if key not in known and identity.is_sandbox_key(key)]


async def _has_owner(store: Look, row: Record) -> bool:
    """Say whether somebody who may live answers for an open row."""
    if row["rollout_id"] is not None:
        return bool(row["held"]) and not await store.is_dead(row["lease_owner"])
    if row["status"] == "releasing" and row["release_attempts"] > 0:
        return False
    worker = custody.owner_of(row["key"])
    return worker is not None and await store.may_live(worker)


async def _released(store: Store, provider_of: ProviderOf, row: Record, left_s: float) -> Swept:
    if row["status"] != "releasing":
        return _swept(row, "open", "nobody is known to own it; it is given up when its time is over")
    try:
        async with asyncio.timeout(max(left_s, 0.0)):
            release = await custody.release(store, provider_of(row["provider"]), row)
    except (TimeoutError, errors.UsageError) as e:
        return _swept(row, "open", str(e) or "there was no time left to ask its provider")
    if release is custody.Release.CLOSED:
        return _swept(row, "removed", row["status"])
    if release is custody.Release.WAS_CLOSED:
        return _swept(row, "gone", "somebody else removed it meanwhile")
    again = await store.history.sandbox(row["key"])
    return _swept(row, "open", (again or row)["last_error"] or "not proven gone")


async def _removed(provider: SandboxProvider, key: str, ref: str, left_s: float) -> list[Swept]:
    """Remove an instance without an open row, unless its owner has done so since it was listed."""
    try:
        async with asyncio.timeout(max(left_s, 0.0)):
            if not await graded.listed(provider, key, ref):
                return []
            await graded.release(provider, key, ref)
    except TimeoutError:
        return [_stray(key, ref, "stray", "there was no time left to ask its provider")]
    except errors.Failure as e:
        return [_stray(key, ref, "stray", str(e))]
    return [_stray(key, ref, "removed", "no open row of the store knew it")]


def _swept(row: Record, outcome: str, detail: str) -> Swept:
    return Swept(
        key=row["key"], rollout_id=row["rollout_id"], provider_ref=row["provider_ref"], outcome=outcome,
        detail=detail,
    )  # fmt: skip


def _stray(key: str, ref: str, outcome: str, detail: str) -> Swept:
    return Swept(key=key, rollout_id=None, provider_ref=ref, outcome=outcome, detail=detail)


async def heal(runtime: Runtime) -> None:
    """Settle what dead workers of this machine left, before this process adds anything.

    Their leases end at once. Rollouts whose caller's session died with them are ended; the others, with the sandboxes
    that they may go on in, wait for whoever resumes them. `runtime` serves no sessions. Nothing is waited for, and every
    failure is logged: it must not stop the work that this process came for.
    """
    store = runtime.store
    try:
        await store.take_from_dead()
        await store.give_up_abandoned(custody.owner_of)
        rows = await store.history.unfinished()
    except store_errors.StoreError as e:
        logger.warning("what dead workers left is not settled yet: %s", e)
        return
    for row in rows:
        if row["endpoint_kind"] == "session" and not row["held"]:
            await _logged(_end_orphan(runtime, row), f"rollout {row['id']} is not settled yet")
    await _release_due(runtime, {})


async def _end_orphan(runtime: Runtime, row: Record) -> None:
    if await is_orphan(runtime.store, row):
        for lease in await runtime.store.claim(limit=1, ids=[row["id"]]):
            await rollout.advance(runtime, lease)


async def is_orphan(store: Look, row: Record) -> bool:
    """Say whether everybody is gone who could work on a rollout: who worked on it last, else who submitted it."""
    attempts = await store.history.of_rollout("attempts", row["id"])
    submitter = rollout.part_of(row, "origin").get("worker")
    last = attempts[-1]["worker_id"] if attempts else submitter
    return last is not None and not await store.may_live(last)


async def keep_releasing(runtime: Runtime, *, every_s: float = 30.0) -> None:
    """Try the releases again that were not proven, each after a longer pause, until cancelled."""
    due: dict[str, float] = {}
    while True:
        await asyncio.sleep(every_s)
        await _release_due(runtime, due)


async def _release_due(runtime: Runtime, due: dict[str, float]) -> None:
    """Release what nobody holds and whose time has come; `due` (key -> time) is brought forward with every failure.

    A graded rollout that waited for it is released with its last sandbox.
    """
    store, now = runtime.store, asyncio.get_running_loop().time()

    async def one(row: Record) -> None:
        if await custody.release(store, runtime.provider, row) is custody.Release.OPEN:
            due[row["key"]] = now + min(_RETRY_CAP_S, _RETRY_S * 2 ** min(row["release_attempts"], 10))

    async def all_of_them() -> None:
        for row in await store.history.open_sandboxes():
            mine = row["status"] == "releasing" and row["provider_ref"] == runtime.provider.ref
            if mine and not row["held"] and due.get(row["key"], 0.0) <= now:
                await _logged(one(row), f"sandbox {row['key']} waits for its release")
        for row in await store.history.unfinished():
            if row["state"] == "graded" and not row["held"]:
                for lease in await store.claim(limit=1, ids=[row["id"]]):
                    await _logged(_walked(lease), f"rollout {row['id']} waits for its release")

    async def _walked(lease: Lease) -> None:
        await rollout.advance(runtime, lease)

    await _logged(all_of_them(), "sandboxes wait for their release")


async def _logged(work: Coroutine[Any, Any, None], what: str) -> None:
    """Do work whose failure must not stop what comes after it."""
    try:
        await work
    except (errors.RolloutsError, store_errors.StoreError) as e:
        logger.warning("%s: %s", what, e)
    except Exception:
        logger.exception("%s", what)
