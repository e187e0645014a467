"""The real `rollouts` command in a process of its own, in an empty folder."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import sys
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.integration.cli import warm

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parents[3]


@dataclass
class Command:
    """Starts the command with a database of its own; `examples` and `offline` are paths of this project."""

    folder: Path
    environ: dict[str, str] = field(default_factory=dict)
    started: list[asyncio.subprocess.Process] = field(default_factory=list)
    examples = ROOT / "examples"
    offline = ROOT / "examples" / "tasks" / "offline__wordcount-1"
    replay = f"replay:{ROOT / 'examples' / 'replay.yaml'}"

    @property
    def database(self) -> Path:
        return self.folder / "logs" / "rollouts.db"

    @property
    def boxes(self) -> Path:
        return self.folder / "boxes"

    @property
    def own_root(self) -> tuple[str, str]:
        """Options for a run that leaves sandboxes behind: not in the folder that everybody shares."""
        return "--set", f"sandbox.root={self.boxes}"

    def environment(self) -> dict[str, str]:
        kept = {
            k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "LANG", "XDG_CACHE_HOME", "TMPDIR")
        }
        return {**kept, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error::ResourceWarning", **self.environ}

    def __call__(self, *arguments: str | Path, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        return warm.run([*map(str, arguments)], cwd=self.folder, env=self.environment(), timeout_s=timeout_s)

    async def start(self, *arguments: str | Path) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "orchestrator",
            *map(str, arguments),
            cwd=self.folder,
            env=self.environment(),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        self.started.append(process)
        return process

    def query(self, sql: str) -> list[list[str]]:
        """Ask the database itself; starting the command for it would take a second each time."""
        with closing(sqlite3.connect(f"file:{self.database}?mode=ro", uri=True)) as connection:
            return [[str(value) for value in row] for row in connection.execute(sql)]


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Command]:
    made = Command(tmp_path)
    yield made
    for process in made.started:
        if process.returncode is None:  # its test failed
            os.kill(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Command, subprocess.CompletedProcess[str]]:
    """Three samples of the offline task, played to their ends once for the whole file."""
    made = Command(tmp_path_factory.mktemp("finished"))
    ran = made("run", made.offline, "--model", made.replay, "-n", "3", "-j", "3", "--run", "first")
    return made, ran


@pytest.fixture
def write_record(tmp_path: Path) -> Callable[[str, str], Path]:
    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write
