"""Caps on processes and memory of a whole sandbox, where this machine lets the worker have cgroups of its own.

A cgroup has one writer: only below the root that this process sees, or below a cgroup that was delegated to it, are
new ones made. Everywhere else the per-process limits of `isolation.limit_commands` must do.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.sandbox.base import Limits

_PREFIX = "areal-sweagent."
_PROBE = "probe-"
_PROBE_KEPT_S = 600.0
_REMOVE_TRIES = 200
_REMOVE_PAUSE_S = 0.01
_MIB = 1024 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Hierarchy:
    """A cgroup under which this process may make others, and the controllers that work there."""

    parent: Path
    controllers: frozenset[str]
    version: int


def find_hierarchies(proc: Path = Path("/proc/self")) -> tuple[Hierarchy, ...]:
    """Return the usable hierarchies, each tried by making and removing a cgroup. Blocking."""
    try:
        own = dict(_own_groups((proc / "cgroup").read_text()))
        mounts = (proc / "mountinfo").read_text().splitlines()
    except OSError:
        return ()
    found: list[Hierarchy] = []
    for line in mounts:
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        inner, mountpoint = before.split(" ")[3:5]
        if kind not in {"cgroup", "cgroup2"} or inner != "/":
            continue
        names = {"pids", "memory"} & set(options.split(",")) if kind == "cgroup" else {""}
        for name in names:
            group = own.get(name)
            if group is not None and (tried := _try(Path(mountpoint), group, name)):
                found.append(tried)
    return tuple(found)


def _own_groups(text: str) -> list[tuple[str, str]]:
    pairs = []
    for line in text.splitlines():
        _, names, path = line.split(":", 2)
        pairs += [(name, path) for name in names.split(",")]
    return pairs


def _try(mountpoint: Path, group: str, controller: str) -> Hierarchy | None:
    parent = mountpoint / group.lstrip("/")
    if group != "/" and not _is_delegated(parent):
        return None
    _sweep_probes(parent)
    probe = (
        parent / f"{_PREFIX}{_PROBE}{os.getpid()}-{os.urandom(4).hex()}"
    )  # threads may look at the same time
    try:
        probe.mkdir()
    except OSError:
        return None
    try:
        files = {"pids": "pids.max", "memory": "memory.max" if controller == "" else "memory.limit_in_bytes"}
        works = frozenset(name for name, file in files.items() if (probe / file).exists())
    finally:
        probe.rmdir()
    return Hierarchy(parent=parent, controllers=works, version=1 if controller else 2) if works else None


def _sweep_probes(parent: Path) -> None:
    """Remove tries whose process was killed in the middle of one: they take microseconds, these are minutes old."""
    oldest = time.time() - _PROBE_KEPT_S
    with contextlib.suppress(OSError):
        for old in parent.glob(f"{_PREFIX}{_PROBE}*"):
            if old.stat().st_mtime < oldest:
                old.rmdir()


def _is_delegated(group: Path) -> bool:
    for name in ("user.delegate", "trusted.delegate"):
        with contextlib.suppress(OSError):
            if os.getxattr(group, name) == b"1":
                return True
    return False


def gaps(hierarchies: tuple[Hierarchy, ...], *, user_id: int) -> tuple[str, ...]:
    """Return which caps do not hold for a worker of that user, in words.

    Without a cgroup that counts processes only RLIMIT_NPROC is left, and the kernel does not apply that to root, which
    a sandbox's processes are outside when the worker is.
    """
    if user_id != 0 or any("pids" in hierarchy.controllers for hierarchy in hierarchies):
        return ()
    return (
        "the worker runs as root without a writable pids cgroup, so the number of processes is not capped",
    )


def group_name(folder: Path) -> str:
    """Return the cgroup's name for a sandbox's folder: cgroups are the whole machine's, keys only unique below a root."""
    root = folder.parent.stat()
    return f"{_PREFIX}{root.st_dev}-{root.st_ino}.{folder.name}"


def make_groups(hierarchies: tuple[Hierarchy, ...], folder: Path, limits: Limits) -> tuple[Path, ...]:
    """Make the cgroups of one sandbox with its limits and return their `cgroup.procs` files. Blocking."""
    made = []
    for hierarchy in hierarchies:
        group = hierarchy.parent / group_name(folder)
        group.mkdir(exist_ok=True)
        if "pids" in hierarchy.controllers and limits.processes is not None:
            (group / "pids.max").write_text(str(limits.processes))
        if "memory" in hierarchy.controllers and limits.memory_mb is not None:
            name = "memory.limit_in_bytes" if hierarchy.version == 1 else "memory.max"
            (group / name).write_text(str(limits.memory_mb * _MIB))
        made.append(group / "cgroup.procs")
    return tuple(made)


def remove_groups(hierarchies: tuple[Hierarchy, ...], folder: Path) -> None:
    """Kill what still runs in the cgroups of one sandbox and remove them. Harmless when repeated. Blocking.

    Raises `TimeoutError` when a cgroup cannot be emptied.
    """
    for hierarchy in hierarchies:
        group = hierarchy.parent / group_name(folder)
        for _ in range(_REMOVE_TRIES):
            if _emptied(group):
                break
            time.sleep(_REMOVE_PAUSE_S)
        else:
            raise TimeoutError(f"processes in the cgroup {group} do not end")


def _emptied(group: Path) -> bool:
    try:
        pids = (group / "cgroup.procs").read_text().split()
    except FileNotFoundError:
        return True
    for pid in pids:
        if pid == "0":  # a process that this PID namespace cannot see; signalling 0 would end ourselves
            continue
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), 9)
    try:
        group.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
