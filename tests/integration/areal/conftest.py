"""One record, and calls as AReaL makes them, in this process, against real sandboxes and a scripted endpoint."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from aweagent.lifecycle import run_agent_with_reward
from orchestrator import entry
from orchestrator.testing.areal_proxy import FakeProxy
from orchestrator.testing.model_server import ScriptedModel
from orchestrator.testing.replay import load_replay

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
TASK = EXAMPLES / "tasks" / "offline__wordcount-1"
KEY = "sess-0123456789abcdef-secret"


@pytest.fixture
async def server() -> AsyncIterator[ScriptedModel]:
    async with ScriptedModel(load_replay(EXAMPLES / "replay.yaml")) as opened:
        yield opened
    await entry.close()


@pytest.fixture
def record() -> dict[str, Any]:
    return {
        "instance_id": "offline__wordcount-1",
        "dataset_kind": "local",
        "repo": "example/wordcount",
        "repo_path": str(TASK / "repo"),
        "workdir": "/testbed",
        "strict": True,
        "targets": ["tests"],
        "problem_statement": (TASK / "problem_statement.md").read_text(),
        "test_patch": (TASK / "test.patch").read_text(),
        **json.loads((TASK / "tests.json").read_text()),
    }


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "fast.yaml"
    path.write_text(
        "extends: train\nllm: {connect_retries: 0, request_timeout_s: 30}\nretry: {backoff_base_s: 0}\n"
    )
    return str(path)


class Caller:
    """Calls as AReaL does, with everything but the record and the key kept the same."""

    def __init__(self, folder: Path, config: str, base_url: str) -> None:
        self.folder, self.config, self.base_url = folder, config, base_url

    async def __call__(self, record: dict[str, Any], key: str = KEY, **changed: Any) -> Any:
        arguments = {
            "agent_type": "swe",
            "agent_config": self.config,
            "result_dir": str(self.folder / "logs"),
            "override_api_key": key,
            "override_base_url": self.base_url,
            "override_llm_model": None,
            "override_opencode_provider": None,
            "override_codex_provider": None,
        }
        return await run_agent_with_reward(record, **{**arguments, **changed})

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(self.folder / "store" / "rollouts.db")) as connection:
            return connection.execute(sql).fetchall()


@pytest.fixture
def call(tmp_path: Path, config: str, server: ScriptedModel, monkeypatch: pytest.MonkeyPatch) -> Caller:
    monkeypatch.setenv("ROLLOUTS_DATABASE_URL", f"sqlite:///{tmp_path / 'store' / 'rollouts.db'}")
    return Caller(tmp_path, config, server.base_url("offline__wordcount-1", 0))


@pytest.fixture
async def proxy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[FakeProxy]:
    """AReaL's proxy, whose model plays the example's turns: sample 0 solves, 1 is wrong, 2 changes nothing."""
    monkeypatch.setenv("ROLLOUTS_DATABASE_URL", f"sqlite:///{tmp_path / 'store' / 'rollouts.db'}")
    monkeypatch.setenv("LOG_DIR", str(tmp_path / "logs"))
    async with FakeProxy(load_replay(EXAMPLES / "replay.yaml")) as opened:
        yield opened
    await entry.close()


@pytest.fixture
def query(tmp_path: Path) -> Any:
    def ask(sql: str) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(tmp_path / "store" / "rollouts.db")) as connection:
            return connection.execute(sql).fetchall()

    return ask
