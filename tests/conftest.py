"""Shared parts of the tests: an open store on a real file, and the clock that its SQL reads."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator import states
from orchestrator.identity import uuid7
from store import rows, workers
from store.rollouts import Store

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    OpenStore = Callable[..., Awaitable[Store]]

EDGES = frozenset((src.value, trigger, dst.value) for (src, trigger), dst in states.EDGES.items())


@pytest.fixture
def new_id() -> Callable[[], str]:
    counter = itertools.count(1)
    return lambda: uuid7(1_800_000_000_000, next(counter).to_bytes(10, "big"))


@pytest.fixture
def open_store(tmp_path: Path, new_id: Callable[[], str]) -> OpenStore:
    """Open a store on this test's database; every call is another worker."""

    async def opened(name: str = "rollouts.db", **options: Any) -> Store:
        return await Store.open(
            f"sqlite:///{tmp_path / name}",
            worker=workers.this_process(new_id()),
            edges=EDGES,
            new_uuid="0123456789abcdef0123456789abcdef",
            **options,
        )

    return opened


@pytest.fixture
async def store(open_store: OpenStore) -> AsyncIterator[Store]:
    opened = await open_store()
    yield opened
    await opened.close()


@pytest.fixture
def new_rollout(new_id: Callable[[], str]) -> Callable[..., rows.NewRollout]:
    """Make a rollout to submit; keyword arguments replace its columns."""

    def made(**columns: Any) -> rows.NewRollout:
        rollout_id = new_id()
        base: dict[str, Any] = {
            "id": rollout_id,
            "idem_key": f"key-{rollout_id}",
            "request_sha256": "request",
            "run_id": "run",
            "instance_id": "demo__demo-1",
            "task_sha256": "task",
            "task_json": "{}",
            "dataset_kind": "local",
            "eval_sha256": "eval",
            "agent_type": "swe",
            "config_sha256": "config",
            "endpoint_kind": "stateless",
            "input": {},
            "fsm_version": 1,
            "outcome_table": 1,
        }
        return rows.NewRollout(**(base | columns))

    return made
