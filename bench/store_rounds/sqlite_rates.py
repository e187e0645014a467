"""SQLite against the others: rates in interleaved rounds on the disk, on a disk of 2 ms a sync, and in memory."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.gates import Gate
from bench.store_rounds.processes import Contender, ContenderFailed, Round
from orchestrator import settings

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[2]
DBOS_VERSION = "3.4.0"
SLOW_SYNC_S = 0.002
"""A disk this slow shows what group commit is for; a faster one is delayed to it, for both sides alike."""
MEMORY = Path("/dev/shm")

Rounds = dict[tuple[str, int], list[Round]]
"""(contender, tasks) -> its rounds."""


@dataclass(frozen=True, slots=True)
class Lane:
    """Contenders that run interleaved on one kind of storage; `plan` says with how many tasks each."""

    folder: Path
    plan: Sequence[tuple[str, int]]
    log: bool = False
    delay_us: int = 0


def sync_s(folder: Path, times: int = 200) -> float:
    """Return the seconds of one fdatasync after a write of 4 KiB, as the fastest tenth takes them.

    Slower ones say how busy the disk is at this moment, and a decision must not hang on that.
    """
    path = folder / "sync"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    took = []
    try:
        for _ in range(times):
            os.write(fd, b"x" * 4096)
            started = time.perf_counter()
            os.fdatasync(fd)
            took.append(time.perf_counter() - started)
    finally:
        os.close(fd)
        path.unlink()
    return statistics.quantiles(took, n=10)[0]


def dbos_python() -> Path:
    """Return the interpreter of DBOS's own environment in the cache, made when it is missing."""
    folder = settings.cache_dir() / f"bench-dbos-{DBOS_VERSION}"
    python = folder / "bin" / "python"
    if (folder / "complete").exists():
        return python
    print(f"installing dbos {DBOS_VERSION} into {folder}", file=sys.stderr)
    install = [
        str(python),
        "-m",
        "pip",
        "install",
        "-q",
        "--disable-pip-version-check",
        f"dbos=={DBOS_VERSION}",
    ]
    for command in ([sys.executable, "-m", "venv", str(folder)], install):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ContenderFailed(f"dbos could not be installed: {done.stderr.strip()[-500:]}")
    (folder / "complete").touch()
    return python


def _command(name: str, database: Path) -> list[str]:
    if name == "dbos":
        return [str(dbos_python()), str(ROOT / "bench" / "store_rounds" / "dbos_steps.py"), str(database)]
    return [sys.executable, "-m", "bench.store_rounds.contenders", name, f"sqlite:///{database}"]


def run(lane: Lane, rounds: int, seconds: float) -> Rounds:
    """Let the lane's contenders take turns for `rounds` rounds of `seconds` each; a shorter first turn warms them up."""
    found: Rounds = {turn: [] for turn in lane.plan}
    if lane.log and shutil.which("strace") is None:
        raise ContenderFailed("strace is not installed; it counts the syncs and delays them")
    with ExitStack() as stack:
        running: dict[str, Contender] = {}
        for name in dict.fromkeys(name for name, _ in lane.plan):
            running[name] = stack.enter_context(
                Contender(
                    _command(name, lane.folder / f"{name}.db"),
                    words=lane.folder / f"{name}.words",
                    log=lane.folder / f"{name}.syncs" if lane.log else None,
                    delay_us=lane.delay_us,
                    cwd=ROOT,
                )
            )
            running[name].ready()
        for number in range(rounds + 1):
            for name, tasks in lane.plan:
                one = running[name].round(seconds if number else seconds / 4, tasks)
                if number:
                    found[name, tasks].append(one)
    return found


def rates(rounds: Rounds) -> dict[str, Any]:
    """Return the median rate of each contender, to be printed."""
    return {
        f"{name} at {tasks}, per s": round(statistics.median(r.rate for r in found), 1)
        for (name, tasks), found in rounds.items()
    }


def ratio(rounds: Rounds, ours: tuple[str, int], other: tuple[str, int]) -> tuple[float, list[float]]:
    """Return the median over rounds of (our rate / the other's of the same round), and every round's."""
    each = [mine.rate / its.rate for mine, its in zip(rounds[ours], rounds[other], strict=True)]
    return statistics.median(each), [round(one, 2) for one in each]


def _against(
    gate: str, rounds: Rounds, ours: int, other: tuple[str, int], target: float, **detail: object
) -> Gate:
    value, each = ratio(rounds, ("ours", ours), other)
    return Gate(
        gate=gate, value=value, op=">=", target=target, rounds=len(each), detail={"each round": each} | detail
    )


def on_disk(folder: Path, rounds: int, seconds: float) -> list[Gate]:
    """Against naive async SQLAlchemy and DBOS, on the disk as it is."""
    plan = [("raw", 1), ("ours", 64), ("naive", 64), ("ours", 32), ("dbos", 32), ("ours", 1), ("dbos", 1)]
    found = run(Lane(folder, plan), rounds, seconds)
    shown = {"one fdatasync, ms": round(sync_s(folder) * 1000, 3)} | rates(found)
    return [
        _against("store.64_vs_naive_async", found, 64, ("naive", 64), 15, **shown),
        _against("store.32_vs_dbos_32", found, 32, ("dbos", 32), 20),
        _against("store.lone_vs_dbos_lone", found, 1, ("dbos", 1), 2),
    ]


def on_slow_disk(folder: Path, rounds: int, seconds: float) -> list[Gate]:
    """Count syncs, and compare with one commit per transition where a sync takes its time."""
    took = sync_s(folder)
    delay_us = 0 if took >= SLOW_SYNC_S else round(SLOW_SYNC_S * 1e6)
    plan = [("raw", 1), ("ours", 64), ("ours", 1)]
    found = run(Lane(folder, plan, log=True, delay_us=delay_us), rounds, seconds)
    how = f"{took * 1000:.2f} ms, and {delay_us / 1000:g} ms more by strace, for both sides"
    shown = {"one fdatasync": how} | rates(found)
    return [
        *_syncs(found),
        _against("store.64_vs_raw", found, 64, ("raw", 1), 10, **shown),
        _against("store.lone_vs_raw", found, 1, ("raw", 1), 0.8),
    ]


def _syncs(found: Rounds) -> list[Gate]:
    """Few syncs per acknowledged transition, yet never less than one per batch."""
    ours = found["ours", 64]
    per_ack = [(r.syncs or 0) / r.count for r in ours]
    per_batch = [(r.syncs or 0) / r.answer["batches"] for r in ours]
    raw = statistics.median((r.syncs or 0) / r.count for r in found["raw", 1])
    lone = statistics.median((r.syncs or 0) / r.count for r in found["ours", 1])
    detail = {"raw, per ack": round(raw, 3), "lone caller, per ack": round(lone, 3)}
    return [
        Gate(gate="store.fdatasync_per_ack", value=statistics.median(per_ack), op="<=", target=0.1,
             rounds=len(ours), detail=detail),
        Gate(gate="store.fdatasync_per_batch", value=min(per_batch), op=">=", target=1.0, rounds=len(ours)),
    ]  # fmt: skip


def in_memory(folder: Path, rounds: int, seconds: float) -> list[Gate]:
    """CPU alone: against one commit per transition where a sync costs nothing."""
    found = run(Lane(folder, [("raw", 1), ("ours", 64), ("ours", 1)]), rounds, seconds)
    return [_against("store.cpu_64_vs_raw", found, 64, ("raw", 1), 0.4, **rates(found))]
