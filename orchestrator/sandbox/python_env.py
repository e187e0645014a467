"""The Python that tasks run on: one given in the settings, or a virtual environment with pytest kept in the cache.

It holds pytest and what pytest needs, nothing else: a package under test that came along would hide the task's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator import errors

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_REQUIREMENTS = ("pytest>=9,<10",)
_DONE = "areal-sweagent.complete"
_LOCK_POLL_S = 0.1
_PROBE = "import json, sys; print(json.dumps([sys.prefix, sys.base_prefix, list(sys.version_info[:3])]))"
_TAIL = 2000


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskPython:
    """An interpreter and the folders of this machine it needs."""

    executable: Path
    folders: tuple[Path, ...]

    @property
    def bin_dir(self) -> Path:
        """Goes first on PATH."""
        return self.executable.parent


async def find(python: Path | None, cache_dir: Path) -> TaskPython:
    """Return the interpreter of the settings, or the cached environment, made when it is missing.

    Raises `errors.UsageError` for an interpreter that does not run, `errors.SandboxCreateFailed` when the
    environment cannot be made (pytest comes from the package index, so the first time needs a network).
    """
    executable = python or await _cached(cache_dir)
    code, output = await _call([str(executable), "-I", "-c", _PROBE])
    if code != 0:
        raise errors.UsageError(
            f"the task interpreter {executable} does not run: {output[-_TAIL:]}",
            hint="correct sandbox.python",
        )
    prefix, base_prefix, _ = json.loads(output.splitlines()[-1])
    real = executable.resolve()
    candidates = [Path(prefix), Path(base_prefix)]
    if not any(real.is_relative_to(folder.resolve()) for folder in candidates):
        candidates.append(real.parent.parent)
    folders = tuple(dict.fromkeys(f for f in candidates if not f.is_relative_to("/usr")))
    for folder in folders:
        if folder == Path("/") or folder == Path.home():
            raise errors.UsageError(
                f"the task interpreter {executable} would open {folder} to sandboxes",
                hint="set sandbox.python to the interpreter of a virtual environment",
            )
    return TaskPython(executable=executable, folders=folders)


async def _cached(cache_dir: Path) -> Path:
    identity = json.dumps([sys.version, sys.base_prefix, _REQUIREMENTS])
    folder = cache_dir / f"pytest-env-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    executable = folder / "bin" / "python"
    if (folder / _DONE).exists():
        return executable
    await asyncio.to_thread(cache_dir.mkdir, parents=True, exist_ok=True)
    async with _locked(folder.with_suffix(".lock")):
        if not (folder / _DONE).exists():
            await _make(folder, executable)
    return executable


async def _make(folder: Path, executable: Path) -> None:
    """Build in place under the lock: scripts of an environment name its path, so it cannot be moved later.

    The marker appears in one step when all is done; a folder without it is a dead builder's and made anew.
    """
    await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
    install = [
        str(executable),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-input",
    ]
    for argv in ([sys.executable, "-m", "venv", str(folder)], [*install, *_REQUIREMENTS]):
        code, output = await _call(argv)
        if code != 0:
            raise errors.SandboxCreateFailed(
                f"the Python environment for tasks could not be made in {folder}: {output[-_TAIL:].strip()}",
                hint="connect to a package index once, or set sandbox.python to an interpreter that has pytest",
            )
    temporary = folder / f"{_DONE}.{os.getpid()}"
    temporary.write_text("\n".join(_REQUIREMENTS) + "\n")
    temporary.replace(folder / _DONE)


@contextlib.asynccontextmanager
async def _locked(path: Path) -> AsyncIterator[None]:
    """Hold a lock between processes; the kernel frees it when its holder dies."""
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(_LOCK_POLL_S)
        yield


async def _call(argv: list[str]) -> tuple[int, str]:
    """Run a trusted program in the worker's own environment: it needs the proxy and index settings."""
    try:
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    except OSError as error:
        return 127, str(error)
    try:
        output, _ = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    return process.returncode or 0, output.decode(errors="replace")
