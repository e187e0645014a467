"""Who a worker is: new for every process start, and told apart from the dead by host, boot, PID namespace and pid."""

from __future__ import annotations

import hashlib
import os
import socket
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerIdentity:
    """One process incarnation."""

    worker_id: str
    host: str
    boot_id: str
    pid_ns: str
    """The PID namespace's inode; empty where it cannot be read, which proves nothing about anybody."""
    pid: int
    pid_started: str
    """Start time in clock ticks since boot, as the kernel gives it."""
    code_version: str


def this_process(worker_id: str) -> WorkerIdentity:
    """Describe the running process."""
    try:
        pid_ns = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        pid_ns = ""
    return WorkerIdentity(
        worker_id=worker_id,
        host=socket.gethostname(),
        boot_id=boot_id(),
        pid_ns=pid_ns,
        pid=os.getpid(),
        pid_started=_started(os.getpid()),
        code_version=code_version(),
    )


def boot_id() -> str:
    """Return the kernel's id of this boot, empty where there is none."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text(encoding="ascii").strip() if path.exists() else ""


def _started(pid: int) -> str:
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    return stat.rpartition(")")[2].split()[19]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """What a worker wrote down of itself, as far as it tells whether it lives."""

    host: str
    boot_id: str
    pid_ns: str
    pid: int
    pid_started: str
    heartbeat_at: int
    """Epoch milliseconds."""

    @classmethod
    def of(cls, row: Any) -> Recorded:  # noqa: ANN401 - a row of `workers`
        """Take what counts from a row, a mapping."""
        return cls(**{field.name: row[field.name] for field in fields(cls)})


def runs(worker: Recorded, here: WorkerIdentity) -> bool | None:
    """Say whether a recorded worker still runs, None when that cannot be seen from `here`, the process that asks.

    Another boot of this host ended it, unless it was heard of since: then another machine has the same name.
    """
    if worker.host != here.host or not worker.boot_id:
        return None
    if worker.boot_id != here.boot_id:
        return False if worker.heartbeat_at < _booted_ms() else None
    if not here.pid_ns or worker.pid_ns != here.pid_ns:
        return None
    try:
        os.kill(worker.pid, 0)
        stat = Path(f"/proc/{worker.pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (ProcessLookupError, FileNotFoundError):
        return False
    except PermissionError:  # somebody else's process; whose, /proc may not say
        return None
    state, *fields = stat.rpartition(")")[2].split()
    return state not in {"Z", "X"} and fields[18] == worker.pid_started


def _booted_ms() -> float:
    return (time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)) * 1000


def code_version() -> str:
    """Return a digest of the program's own source files, so that rows say which code wrote them."""
    root = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for package in ("orchestrator", "store", "migrations"):
        for path in sorted((root / package).rglob("*.py")):
            digest.update(f"{path.relative_to(root)}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
