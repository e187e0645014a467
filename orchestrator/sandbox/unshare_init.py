"""First process of a sandbox made with `unshare`: builds the view, gives up all rights, starts the program, reaps.

Run as a script by the worker's interpreter inside fresh namespaces; imports nothing of the project.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import socket
import struct
import sys
from dataclasses import dataclass
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_REMOUNT = 1, 2, 4, 32
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18
_MNT_DETACH = 2
_PR_SET_NO_NEW_PRIVS, _PR_CAPBSET_DROP, _PR_CAP_AMBIENT, _AMBIENT_CLEAR = 38, 24, 47, 4
_LAST_CAP = 63
_CAP_VERSION_3 = 0x20080522
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_COVERED_PROC = ("sys", "sysrq-trigger", "irq", "bus", "fs", "acpi", "scsi", "mtrr")
"""Parts of /proc that would change the machine; root outside keeps its owner's rights over them."""
_SIGNAL_BASE = 128


def _check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def _mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    encoded = [s.encode() if s is not None else None for s in (source, target, kind)]
    _check(_LIBC.mount(*encoded, ctypes.c_ulong(flags), data.encode() if data else None), f"mount {target}")


def _locked_flags(path: str) -> int:
    """Return the flags of the mount below that a user namespace may not drop when it mounts the place again."""
    flags = os.statvfs(path).f_flag
    return flags & (_MS_NOSUID | _MS_NODEV | 8 | 1024 | 2048)


def _bind(source: str, target: Path, *, writable: bool) -> None:
    if Path(source).is_dir():
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    _mount(source, str(target), None, _MS_BIND | _MS_REC)
    if not writable:
        _mount(source, str(target), None, _MS_BIND | _MS_REMOUNT | _MS_RDONLY | _locked_flags(str(target)))


def _build(options: _Options) -> None:
    root = Path(options.scratch)
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    root.mkdir(exist_ok=True)
    _mount("tmpfs", str(root), "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=755,size=4m")
    for link, target in options.links:
        (root / link.lstrip("/")).symlink_to(target)
    (root / "proc").mkdir()
    _mount("proc", str(root / "proc"), "proc", _MS_NOSUID | _MS_NODEV | 8)
    for name in _COVERED_PROC:
        covered = root / "proc" / name
        if covered.exists():
            _bind(str(covered), covered, writable=False)
    device_root = root / "dev"
    device_root.mkdir()
    for name in _DEVICES:
        _bind(f"/dev/{name}", device_root / name, writable=True)
    for name, target in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        (device_root / name).symlink_to(f"/proc/self/{target}")
    for source, inside, writable in options.mounts:
        _bind(source, root / inside.lstrip("/"), writable=writable)
    os.chdir(root)
    syscall = {"x86_64": 155, "aarch64": 41, "riscv64": 41}[os.uname().machine]
    _check(_LIBC.syscall(syscall, b".", b"."), "pivot_root")
    _check(_LIBC.umount2(b".", _MNT_DETACH), "umount of the old root")
    os.chdir("/")
    _mount("none", "/", None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)


def _raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(sock, _SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | _IFF_UP))


def _drop_rights() -> None:
    _check(_LIBC.prctl(_PR_CAP_AMBIENT, _AMBIENT_CLEAR, 0, 0, 0), "clearing ambient capabilities")
    for capability in range(_LAST_CAP + 1):
        _LIBC.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)  # fails beyond the kernel's last one
    header = struct.pack("Ii", _CAP_VERSION_3, 0)
    _check(_LIBC.capset(header, struct.pack("6I", 0, 0, 0, 0, 0, 0)), "capset")
    _check(_LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")


@dataclass(frozen=True)
class _Options:
    """What the worker asks for; written by `isolation.launch_argv`."""

    scratch: str
    info_fd: int
    workdir: str
    loopback: bool
    links: list[tuple[str, str]]
    mounts: list[tuple[str, str, bool]]
    """(outside, inside, writable), in order."""
    env: dict[str, str]


def _reap(child: int) -> int:
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else _SIGNAL_BASE - code


def main() -> int:
    """Build, start, reap; the exit code is the program's, 128 + number for a signal."""
    options = _Options(**json.loads(sys.argv[1]))
    # The old /proc still belongs to the PID namespace outside, so it shows this process's number there.
    os.write(options.info_fd, json.dumps({"child-pid": int(Path("/proc/self").readlink().name)}).encode())
    os.close(options.info_fd)
    _build(options)
    if options.loopback:
        _raise_loopback()
    socket.sethostname("sandbox")
    _drop_rights()
    os.chdir(options.workdir)
    child = os.fork()
    if child == 0:
        os.execve(sys.argv[2], sys.argv[2:], options.env)  # noqa: S606
    return _reap(child)


if __name__ == "__main__":
    sys.exit(main())
