"""The real driver with real sandboxes in a process that dies beside a side effect, and in the one that comes after."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import SecretStr

from orchestrator import identity, rollout, settings
from orchestrator.agents.base import Endpoint
from orchestrator.sandbox.local import LocalProvider
from orchestrator.tasks.source import load_tasks
from orchestrator.testing.model_server import ScriptedModel
from orchestrator.testing.replay import parse_replay
from store import failpoints
from store.heartbeat import Heartbeat
from tests.integration.durability.forking import ROOT
from tests.integration.durability.scenarios import SETUP_TTL_S, open_store

if TYPE_CHECKING:
    from tests.integration.durability.forking import Link

TASK = ROOT / "examples" / "tasks" / "offline__wordcount-1"
ENTER = "cd wordcount && export TARGET=counting.py"
FIX = r"""sed -i "s/\[a-z\]+\"/[a-z]+(?:'[a-z]+)*\"/" "$TARGET" """
TURNS: list[dict[str, Any]] = [
    {"tool_calls": [{"name": "bash", "arguments": {"command": ENTER}}]},
    {"tool_calls": [{"name": "bash", "arguments": {"command": FIX}}]},
    {"tool_calls": [{"name": "submit", "arguments": {}}]},
]


async def drive(
    link: Link, url: str, root: str, rollout_id: str | None, place: str | None, passes: int
) -> None:
    """Submit a rollout, or take up an old one whose worker is long gone, and run it; die at the place's nth pass."""
    store = await open_store(url, later_s=2 * SETUP_TTL_S if rollout_id else 0.0)
    provider = LocalProvider(settings.SandboxSettings(root=Path(root)), cache_dir=settings.cache_dir())
    await provider.preflight()
    counter = itertools.count(os.getpid() << 20)
    replay = parse_replay({"*": [{"name": "scripted", "turns": TURNS}]})
    async with Heartbeat(store) as heartbeat, ScriptedModel(replay) as model:
        endpoint = Endpoint(
            base_url=model.base_url("any", 0), model="scripted", api_key=SecretStr("sk-planted-0123456789")
        )
        runtime = rollout.Runtime(
            store=store,
            heartbeat=heartbeat,
            provider=provider,
            endpoint_of=lambda _row, _settings: endpoint,
            new_id=lambda: identity.uuid7(1_800_000_000_000, next(counter).to_bytes(10, "big")),
            monotonic=time.monotonic,
            elapsed=time.monotonic,
            random=lambda: 0.0,
        )
        if rollout_id is None:
            ((rollout_id, _),) = await rollout.submit(runtime, [_request()])
        link.say(rollout_id)
        failpoints.install(_exit_at(place, passes) if place else None)
        ending = await rollout.run(runtime, rollout_id)
        left = await provider.list_ours(identity.sandbox_prefix(store.uuid))
    link.say({"state": ending.state.value, "reward": ending.reward, "left": [box.key for box in left]})
    await provider.close()
    await store.close()


def _request() -> rollout.Request:
    (task,) = load_tasks(TASK, cache_dir=settings.cache_dir()).tasks
    quick = {"retry.backoff_base_s": 0.0, "agent.timeout_s": 60.0}
    return rollout.Request(
        task=task, settings=settings.load("train", arguments=quick, environ={}), run_id="run"
    )


def _exit_at(place: str, passes: int) -> Any:
    passed: list[str] = []

    def action(point: str) -> None:
        passed.append(point)
        if passed.count(place) == passes:
            os._exit(137)

    return action
