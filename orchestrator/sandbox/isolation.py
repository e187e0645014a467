"""What a local sandbox can see, and the command lines of the mechanisms that keep it apart from this machine.

A `View` is the whole world of a sandboxed process: nothing that is not listed in it exists there.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, assert_never

from orchestrator.sandbox.base import Isolation

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from orchestrator.sandbox.base import Limits

MARKER = "AREAL_SWEAGENT_SANDBOX"
"""Environment variable that names the sandbox folder in every process that holds a sandbox up."""
TREE_MARKER = "AREAL_SWEAGENT_TREE"
"""Tells the process trees of one sandbox apart where no PID namespace does."""

HOME = "/home/agent"
PRIVATE = "/private"
USER_ID = 1000
"""Looks unprivileged inside; outside it is whoever runs the worker."""
_ROOT_FOLDERS = ("/bin", "/sbin", "/lib", "/lib64", "/lib32", "/libx32")
_ETC_FILES = (
    "/etc/alternatives",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/localtime",
    "/etc/mime.types",
    "/etc/ssl/certs",
    "/etc/ssl/openssl.cnf",
)
_MACHINE_PROC = ("sys", "sysrq-trigger", "irq", "bus", "fs", "acpi", "scsi", "mtrr")
"""Parts of /proc that would change the whole machine: a worker that runs as root owns them inside as well, and
bubblewrap itself covers only those whose top folder looks writable."""
_SYNTHETIC_ETC = {
    "passwd": f"agent:x:{USER_ID}:{USER_ID}:agent:{HOME}:/bin/bash\nnobody:x:65534:65534:nobody:/:/bin/false\n",
    "group": f"agent:x:{USER_ID}:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
_RESERVED = (
    "/",
    "/usr",
    "/etc",
    "/proc",
    "/dev",
    "/sys",
    "/run",
    "/tmp",  # noqa: S108
    "/home",
    HOME,
    PRIVATE,
    *_ROOT_FOLDERS,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mount:
    """One folder or file of this machine and where the sandbox sees it; plain text, because a live sandbox has a dozen."""

    inside: str
    outside: str
    writable: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """Everything a process of one sandbox sees: folders, links, variables."""

    isolation: Isolation
    workdir: str
    folder: Path
    """The sandbox's folder on this machine."""
    mounts: tuple[Mount, ...]
    links: tuple[tuple[str, str], ...] = ()
    """(link, target) at the root, such as `/bin` -> `usr/bin`."""
    env: Mapping[str, str] = field(default_factory=dict)
    network: bool = False

    @property
    def private_dir(self) -> str:
        """The private directory as a program started with `private` sees it."""
        return str(self.folder / "private") if self.isolation is Isolation.NONE else PRIVATE


def is_usable_workdir(workdir: str) -> bool:
    """Say whether a repository can be mounted there: absolute, plain, and not over the sandbox's own folders."""
    if not workdir.startswith("/") or workdir.startswith("//") or "\0" in workdir:
        return False
    if any(part in {".", "..", ""} for part in workdir.rstrip("/").split("/")[1:]):
        return False
    if workdir in _RESERVED:
        return False
    system = ("/usr", "/etc", "/proc", "/dev", "/sys", "/run", PRIVATE, *_ROOT_FOLDERS)
    return not any(workdir.startswith(f"{folder}/") for folder in system)


def write_etc(folder: Path) -> None:
    """Write the few account files a sandbox gets instead of this machine's."""
    folder.mkdir()
    for name, text in _SYNTHETIC_ETC.items():
        (folder / name).write_text(text)


@cache
def system_mounts() -> tuple[tuple[Mount, ...], tuple[tuple[str, str], ...]]:
    """Return the read-only system folders of this machine and the root links that lead into them.

    Every sandbox of a worker shares them: a hundred of their own would be thousands of objects.
    """
    mounts = [Mount(inside="/usr", outside="/usr")]
    links: list[tuple[str, str]] = []
    for name in _ROOT_FOLDERS:
        path = Path(name)
        if path.is_symlink():
            links.append((name, str(path.readlink())))
        elif path.is_dir():
            mounts.append(Mount(inside=name, outside=name))
    mounts += [Mount(inside=name, outside=name) for name in _ETC_FILES if Path(name).exists()]
    return tuple(mounts), tuple(links)


def folder_mounts(
    folder: Path, workdir: str, read_only: Sequence[Path], *, network: bool
) -> tuple[Mount, ...]:
    """Return what a sandbox sees of its own folder and of `read_only`, in the order in which it must be mounted.

    Read-only folders come after the sandbox's own `/tmp` and home, because they may lie below those on this machine.
    """
    etc = [Mount(inside=f"/etc/{name}", outside=f"{folder}/etc/{name}") for name in _SYNTHETIC_ETC]
    resolver = Path("/etc/resolv.conf")
    if network and resolver.exists():
        etc.append(Mount(inside=str(resolver), outside=str(resolver.resolve())))
    return (
        *etc,
        Mount(inside="/tmp", outside=f"{folder}/tmp", writable=True),  # noqa: S108
        Mount(inside="/dev/shm", outside=f"{folder}/shm", writable=True),  # noqa: S108
        Mount(inside=HOME, outside=f"{folder}/home", writable=True),
        *(Mount(inside=str(path), outside=str(path)) for path in read_only),
        Mount(inside=workdir, outside=f"{folder}/work", writable=True),
    )


def private_mount(folder: Path) -> Mount:
    """Return the mount that only programs started with `private` get."""
    return Mount(inside=PRIVATE, outside=f"{folder}/private", writable=True)


def launch_argv(
    view: View, argv: Sequence[str], *, env: Mapping[str, str], info_fd: int, private: bool
) -> list[str]:
    """Return the command line that runs `argv` inside the view.

    The mechanism writes `{"child-pid": N}` to `info_fd`: the first process of the sandbox's PID namespace,
    seen from here. Without isolation nothing is written.
    """
    mounts = view.mounts + ((private_mount(view.folder),) if private else ())
    match view.isolation:
        case Isolation.BWRAP:
            return [*_bwrap(view, mounts, env, info_fd), "--", *argv]
        case Isolation.UNSHARE:
            return _unshare(view, mounts, env, info_fd, argv)
        case Isolation.NONE:
            pairs = [f"{name}={value}" for name, value in env.items()]
            return ["setpriv", "--pdeathsig", "KILL", "env", "-i", *pairs, *argv]
        case Isolation.REMOTE:
            raise ValueError("a remote sandbox has no local command line")
        case _:
            assert_never(view.isolation)


def _bwrap(view: View, mounts: Sequence[Mount], env: Mapping[str, str], info_fd: int) -> list[str]:
    command = ["bwrap", "--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--clearenv"]
    command += ["--uid", str(USER_ID), "--gid", str(USER_ID), "--hostname", "sandbox", "--cap-drop", "ALL"]
    command += ["--info-fd", str(info_fd)]
    if view.network:
        command.append("--share-net")
    command += ["--proc", "/proc", "--dev", "/dev"]
    for name in _MACHINE_PROC:
        command += ["--ro-bind-try", f"/proc/{name}", f"/proc/{name}"]
    for link, target in view.links:
        command += ["--symlink", target, link]
    for mount in mounts:
        command += ["--bind" if mount.writable else "--ro-bind", mount.outside, mount.inside]
    command += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", view.workdir]
    for name, value in env.items():
        command += ["--setenv", name, value]
    return command


def _unshare(
    view: View, mounts: Sequence[Mount], env: Mapping[str, str], info_fd: int, argv: Sequence[str]
) -> list[str]:
    command = ["setpriv", "--pdeathsig", "KILL", "unshare", "--user", f"--map-user={USER_ID}"]
    command += [f"--map-group={USER_ID}", "--keep-caps", "--mount", "--pid", "--fork", "--kill-child"]
    command += ["--ipc", "--uts", *([] if view.network else ["--net"])]
    options = {
        "scratch": str(view.folder / "root"),
        "info_fd": info_fd,
        "workdir": view.workdir,
        "loopback": not view.network,
        "links": view.links,
        "mounts": [(mount.outside, mount.inside, mount.writable) for mount in mounts],
        "env": dict(env),
    }
    init = str(Path(__file__).with_name("unshare_init.py"))
    return [*command, sys.executable, "-I", "-S", init, json.dumps(options), *argv]


def limit_commands(limits: Limits, *, cap_processes: int | None) -> str:
    """Return the `ulimit` lines of bash that put the limits on a process and all its children.

    Sizes of `ulimit` are KiB; memory is capped as private writable memory (RLIMIT_DATA), because address space
    alone says little. `cap_processes` is set only where no cgroup counts processes.
    """
    lines = ["ulimit -c 0", "ulimit -n 4096 2>/dev/null"]
    if limits.file_mb is not None:
        lines.append(f"ulimit -f {limits.file_mb * 1024}")
    if limits.memory_mb is not None:
        lines.append(f"ulimit -d {limits.memory_mb * 1024}")
    if limits.cpu_s is not None:
        lines.append(f"ulimit -t {limits.cpu_s}")
    if cap_processes is not None:
        lines.append(f"ulimit -u {cap_processes} 2>/dev/null")
    return "; ".join(lines)
