"""Runs the command in a process forked from one that has imported everything: seconds less each time."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_IMPORTED = ("orchestrator.cli.main", "orchestrator.cli.conduct", "openai", "alembic.command", __name__)


def run(
    arguments: list[str], *, cwd: Path, env: dict[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Do what `subprocess.run` of `rollouts ARGUMENTS` does; raises `subprocess.TimeoutExpired`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_IMPORTED))
    number = len(list(cwd.glob(".said-*")))
    out, err = cwd / f".said-{number}-out", cwd / f".said-{number}-err"
    process = context.Process(target=_be_the_command, args=(arguments, cwd, env, out, err))
    process.start()
    process.join(timeout_s)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise subprocess.TimeoutExpired(arguments, timeout_s, out.read_text(), err.read_text())
    return subprocess.CompletedProcess(arguments, process.exitcode, out.read_text(), err.read_text())


def _be_the_command(arguments: list[str], cwd: Path, env: dict[str, str], out: Path, err: Path) -> None:
    for path, number in ((os.devnull, 0), (out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    warnings.simplefilter("error", ResourceWarning)
    sys.argv = ["rollouts", *arguments]
    from orchestrator.cli.main import main

    main()
