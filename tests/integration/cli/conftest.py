"""The real `rollouts` command in a process of its own, in an empty folder."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import shutil
import signal
import sqlite3
import sys
import venv
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
    task_python: Path
    environ: dict[str, str] = field(default_factory=dict)
    started: list[asyncio.subprocess.Process] = field(default_factory=list)
    examples = ROOT / "examples"
    offline = ROOT / "examples" / "tasks" / "offline__wordcount-1"
    replay = f"replay:{ROOT / 'examples' / 'replay.yaml'}"

    @property
    def python(self) -> tuple[str, str]:
        """The setting that spares the making of an environment for tasks."""
        return "--set", f"sandbox.python={self.task_python}"

    @property
    def database(self) -> Path:
        return self.folder / "logs" / "rollouts.db"

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


@pytest.fixture(scope="session")
def task_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with pytest and what it needs; the plugins of these tests would take seconds at every start."""
    folder = tmp_path_factory.mktemp("task") / "env"
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/*/site-packages")
    for name in ("pytest", "pluggy", "iniconfig", "packaging", "pygments"):
        for file in importlib.metadata.files(name) or ():
            if ".." not in file.parts:
                (site / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(file.locate(), site / file)
    return folder / "bin" / "python"


@pytest.fixture
def command(tmp_path: Path, task_python: Path) -> Iterator[Command]:
    made = Command(tmp_path, task_python)
    yield made
    for process in made.started:
        if process.returncode is None:  # its test failed
            os.kill(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def finished(
    tmp_path_factory: pytest.TempPathFactory, task_python: Path
) -> tuple[Command, subprocess.CompletedProcess[str]]:
    """Three samples of the offline task, played to their ends once for the whole file."""
    made = Command(tmp_path_factory.mktemp("finished"), task_python)
    ran = made(
        "run", made.offline, "--model", made.replay, "-n", "3", "-j", "3", "--run", "first", *made.python
    )
    return made, ran


@pytest.fixture
def write_record(tmp_path: Path) -> Callable[[str, str], Path]:
    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write
