"""AReaL's way in: one call per rollout on a worker's single event loop, sharing one store and its sandboxes.

Nothing but cancellation leaves as an exception, because AReaL would train on it as a reward of 0.0.
"""

from __future__ import annotations

import asyncio
import copy
import getpass
import hashlib
import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from pydantic import SecretStr

from orchestrator import assembly, errors, recovery, rollout, settings
from orchestrator.agents.base import Endpoint
from orchestrator.rollout import Request

if TYPE_CHECKING:
    from collections.abc import Mapping

    from orchestrator.rollout import Ending, Runtime
    from orchestrator.sandbox.base import SandboxProvider
    from orchestrator.settings import Settings
    from orchestrator.tasks.record import Task

logger = logging.getLogger(__name__)

_PLACEHOLDERS = frozenset({"", "empty", "dummy", "none"})
"""Keys that many rollouts share, so that they say nothing about who calls."""
_CALL_KEYS = ("econfig", "override_api_key", "override_base_url")
"""Keys of a record that belong to the call and not to the task; one of them is a secret."""


@dataclass(slots=True)
class _Loop:
    """What the calls of one event loop share."""

    worker: assembly.Worker
    run_id: str
    runtimes: dict[str, Runtime] = field(default_factory=dict)
    """Sandbox settings -> runtime: each configuration may want its own kind of sandbox."""
    endpoints: dict[str, Endpoint] = field(default_factory=dict)
    """Rollout id -> endpoint with its key; lives in memory only, and only as long as the call."""
    upkeep: list[asyncio.Task[None]] = field(default_factory=list)
    """Settles what dead workers left, and releases that wait, beside the calls."""
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)


_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, asyncio.Task[_Loop]]] = WeakKeyDictionary()
"""Event loop -> database URL -> what is shared there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One call of AReaL's, with everything that is not in the record."""

    agent_type: str
    config: str
    result_dir: str
    api_key: str
    base_url: str | None
    model: str | None = None


async def run_record(data: Mapping[str, Any], call: Call) -> tuple[float | None, dict[str, Any]]:
    """Run one record to its reward; `(None, stats)` means that there is none and the sample must be dropped.

    Only `asyncio.CancelledError` is raised, after the rollout's end has been written down. `data` is never changed.
    """
    instance_id = data.get("instance_id", "unknown")
    try:
        ending = await _run(copy.deepcopy(dict(data)), call)
    except errors.RolloutsError as e:
        logger.error("%s: no reward: %s (%s)", instance_id, e, e.hint)
        return None, {}
    except Exception:
        logger.exception("%s: no reward, because the rollout could not be run", instance_id)
        return None, {}
    if ending.reward is None:
        why = ending.failure_class or f"state {ending.state}"
        logger.error(
            "%s: rollout %s has no reward: %s %s", instance_id, ending.rollout_id, why, ending.message
        )
    return ending.reward, ending.stats or {}


async def close() -> None:
    """Let go of what this event loop holds open; the next call opens it anew."""
    openings = _loops.pop(asyncio.get_running_loop(), {}).values()
    for opened in await asyncio.gather(*openings, return_exceptions=True):
        if isinstance(opened, _Loop):  # an error was told to the calls that waited for it
            for task in opened.upkeep:
                task.cancel()
            await asyncio.gather(*opened.upkeep, return_exceptions=True)
            await opened.worker.stop()


async def _run(data: dict[str, Any], call: Call) -> Ending:
    chosen = _settings(data, call)
    task = await asyncio.to_thread(_task, {k: v for k, v in data.items() if k not in _CALL_KEYS})
    shared = await _shared(call.result_dir)
    runtime = await _runtime(shared, chosen)
    request = Request(
        task=task,
        settings=chosen,
        run_id=shared.run_id,
        endpoint_kind="session",
        origin={"user": getpass.getuser()},
        key=identity_of(call.api_key) or runtime.new_id(),
    )
    ((rollout_id, _),) = await rollout.submit(runtime, [request])
    shared.endpoints[rollout_id] = Endpoint(
        base_url=chosen.llm.base_url or "", model=chosen.llm.model, api_key=SecretStr(call.api_key or "EMPTY")
    )
    try:
        return await rollout.run(runtime, rollout_id)
    finally:
        shared.endpoints.pop(rollout_id, None)


def identity_of(api_key: str, environ: Mapping[str, str] | None = None) -> str | None:
    """Return the rollout's identity, sha256 of its own key; None for a key that other rollouts use as well."""
    shared = api_key.strip().lower() in _PLACEHOLDERS
    if shared or api_key == settings.variable("OPENAI_API_KEY", environ=environ):
        return None
    return hashlib.sha256(api_key.encode()).hexdigest()


def _settings(data: dict[str, Any], call: Call) -> Settings:
    econfig = data.get("econfig")
    loaded = settings.load(
        call.config,
        arguments={"agent.type": call.agent_type, "llm.base_url": call.base_url, "llm.model": call.model},
        econfig=econfig if isinstance(econfig, dict) else None,
    )
    if not loaded.llm.base_url:
        raise errors.ConfigError("no model endpoint is named", hint="pass override_base_url")
    return loaded


def _task(record: dict[str, Any]) -> Task:
    """Return the task of a record; raises `errors.RecordRefused`."""
    from orchestrator.tasks import swebench_rows
    from orchestrator.tasks.dialects import normalise

    task = normalise(record, base_dir=Path.cwd())
    if not swebench_rows.needs_script(task):
        return task
    (completed,) = swebench_rows.with_eval_scripts([task], python=Path(sys.executable))
    if isinstance(completed, errors.RecordRefused):
        raise completed
    return completed


async def _shared(result_dir: str) -> _Loop:
    """Return what this event loop's calls share, opened by the first of them."""
    url = settings.variable("ROLLOUTS_DATABASE_URL") or f"sqlite:///{Path(result_dir) / 'rollouts.db'}"
    loop = asyncio.get_running_loop()
    openings = _loops.setdefault(loop, {})
    opening = openings.get(url)
    if opening is None or (opening.done() and (opening.cancelled() or opening.exception() is not None)):
        opening = openings[url] = loop.create_task(_open(url), name="open-store")
    return await asyncio.shield(opening)


async def _open(url: str) -> _Loop:
    worker = await assembly.Worker.start(url)
    return _Loop(worker=worker, run_id=f"areal-{worker.store.worker.worker_id}")


async def _upkeep(shared: _Loop, provider: SandboxProvider) -> None:
    await recovery.heal(
        shared.worker.runtime(
            provider, lambda row, _settings: shared.endpoints[row["id"]], serves_sessions=False
        )
    )
    await recovery.keep_releasing(shared.worker.store, provider)


async def _runtime(shared: _Loop, chosen: Settings) -> Runtime:
    key = chosen.sandbox.model_dump_json()
    async with shared.opening:
        if key not in shared.runtimes:
            from orchestrator.sandbox import registry

            provider = registry.make(chosen.sandbox, cache_dir=settings.cache_dir())
            await provider.preflight()
            shared.runtimes[key] = shared.worker.runtime(
                provider, lambda row, _settings: shared.endpoints[row["id"]], on_cancel="fail"
            )
            shared.upkeep.append(asyncio.create_task(_upkeep(shared, provider), name="upkeep"))
        return shared.runtimes[key]
