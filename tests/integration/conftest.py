"""A whole machine for one rollout: real store, real local sandboxes, a scripted model over real HTTP."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import SecretStr

from orchestrator import identity, rollout, settings
from orchestrator.agents.base import Endpoint
from orchestrator.sandbox.local import LocalProvider
from orchestrator.tasks.source import load_tasks
from orchestrator.testing.faults import FaultyProvider
from orchestrator.testing.model_server import ScriptedModel
from orchestrator.testing.replay import parse_replay
from store.heartbeat import Heartbeat

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from orchestrator.states import State
    from orchestrator.tasks.record import Task
    from store.rollouts import Store

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PLANTED_KEY = "sk-planted-0123456789"


@dataclass
class Machine:
    """What a test drives."""

    store: Store
    runtime: rollout.Runtime
    provider: FaultyProvider
    task: Task
    settings: settings.Settings
    base_url: str = ""
    moves: list[State] = field(default_factory=list)
    submitted: int = 0
    planted_key: str = PLANTED_KEY

    async def play(
        self, *turns: dict[str, Any], task: Task | None = None, **arguments: Any
    ) -> rollout.Ending:
        """Run one new rollout of the task against these turns to its end."""
        rollout_id = await self.submit(task, **arguments)
        return await self.serve(rollout_id, *turns)

    async def serve(self, rollout_id: str, *turns: dict[str, Any]) -> rollout.Ending:
        """Run a submitted rollout against these turns."""
        async with ScriptedModel(parse_replay({"*": [{"name": "scripted", "turns": list(turns)}]})) as server:
            self.base_url = server.base_url("any", 0)
            return await rollout.run(self.runtime, rollout_id)

    async def submit(self, task: Task | None = None, **arguments: Any) -> str:
        """Store one new rollout; `section__key=value` changes a setting."""
        changed = {name.replace("__", "."): value for name, value in arguments.items()}
        effective = settings.load("train", arguments={**FAST, **changed}, environ={})
        self.submitted += 1
        request = rollout.Request(
            task=task or self.task, settings=effective, run_id="run", sample=self.submitted
        )
        ((rollout_id, _),) = await rollout.submit(self.runtime, [request])
        return rollout_id

    async def rows(self, table: str, rollout_id: str) -> list[dict[str, Any]]:
        return await self.store.history.of_rollout(table, rollout_id)

    async def check_nothing_is_left(self) -> None:
        """Every ledger row is closed and the provider knows of no sandbox of ours."""
        query = "SELECT count(*) FROM sandboxes WHERE status NOT IN ('released', 'lost')"
        found = await self.store.history.sql(query, limit=1, timeout_s=5)
        assert found.rows == [(0,)]
        assert await self.provider.list_ours(identity.sandbox_prefix(self.store.uuid)) == []


FAST = {
    "retry.backoff_base_s": 0.0,
    "llm.retry_base_s": 0.0,
    "llm.connect_retries": 0,
    "agent.timeout_s": 60.0,
}


@pytest.fixture(scope="session")
def offline_task() -> Task:
    loaded = load_tasks(EXAMPLES / "tasks" / "offline__wordcount-1", cache_dir=settings.cache_dir())
    return loaded.tasks[0]


@pytest.fixture
async def machine(
    store: Store, new_id: Callable[[], str], offline_task: Task, tmp_path: Path
) -> AsyncIterator[Machine]:
    box = settings.SandboxSettings(root=tmp_path / "boxes")
    provider = FaultyProvider(LocalProvider(box, cache_dir=settings.cache_dir()))
    await provider.preflight()
    async with Heartbeat(store) as heartbeat:
        made: Machine

        def endpoint_of(_row: object, _settings: object) -> Endpoint:
            return Endpoint(base_url=made.base_url, model="scripted", api_key=SecretStr(PLANTED_KEY))

        runtime = rollout.Runtime(
            store=store,
            heartbeat=heartbeat,
            provider=provider,
            endpoint_of=endpoint_of,
            new_id=new_id,
            monotonic=time.monotonic,
            elapsed=time.monotonic,
            random=lambda: 0.0,
            on_move=lambda _id, state: made.moves.append(state),
        )
        made = Machine(
            store=store,
            runtime=runtime,
            provider=provider,
            task=offline_task,
            settings=settings.load("train", environ={}),
        )
        yield made
