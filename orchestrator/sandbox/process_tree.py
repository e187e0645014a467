"""One sandboxed process with everything it starts, held by descriptors: no PID can be mistaken for another.

The launching happens on the event loop's own thread: the parent-death signal that ends a sandbox with its worker
is bound to the thread that started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.sandbox.isolation import MARKER

if TYPE_CHECKING:
    from collections.abc import Sequence

_SIGNAL_BASE = 128
_INFO_TIMEOUT_S = 2.0
_KILL_ROUNDS = 200
_TTY_FIELD = 4
"""Of `/proc/PID/stat`, counted after the name: the controlling terminal."""


class _Ending:
    """Turns a process descriptor into an awaitable."""

    def __init__(self, pidfd: int) -> None:
        self.pidfd = pidfd
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()
        self._open = True
        self._loop.add_reader(pidfd, self._on_exit)

    def _on_exit(self) -> None:
        self._loop.remove_reader(self.pidfd)
        self._event.set()

    @property
    def over(self) -> bool:
        return self._event.is_set()

    async def wait(self) -> None:
        await self._event.wait()

    def kill(self) -> None:
        if self._open:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def close(self) -> None:
        if self._open:
            self._open = False
            self._loop.remove_reader(self.pidfd)
            os.close(self.pidfd)


async def _read_info(fd: int) -> int | None:
    """Return the process number that a mechanism writes as JSON, or None when it ends without. Closes `fd`."""
    os.set_blocking(fd, False)
    loop = asyncio.get_running_loop()
    data = bytearray()
    found: asyncio.Future[int | None] = loop.create_future()

    def on_readable() -> None:
        with contextlib.suppress(BlockingIOError):
            chunk = os.read(fd, 4096)
            data.extend(chunk)
            whole = data.rstrip().endswith(b"}")
            if (whole or not chunk) and not found.done():
                found.set_result(int(json.loads(data)["child-pid"]) if whole else None)

    loop.add_reader(fd, on_readable)
    try:
        return await found
    finally:
        loop.remove_reader(fd)
        os.close(fd)


class ProcessTree:
    """A started tree. Whoever starts one awaits `kill`: afterwards no process of it is left."""

    def __init__(self, process: subprocess.Popen[bytes], mark: Mark | None, info_fd: int) -> None:
        self._process = process
        self._mark = mark
        """Set only without a PID namespace: children are then found by their marker."""
        self._outer = _Ending(os.pidfd_open(process.pid))
        self._init: _Ending | None = None
        self._code: int | None = None
        self._finding = asyncio.ensure_future(self._find_init(info_fd))

    @classmethod
    def launch(
        cls,
        argv: Sequence[str],
        *,
        output_fd: int,
        pass_fds: Sequence[int],
        info_fd: int,
        folder: Path,
        mark: Mark | None,
    ) -> ProcessTree:
        """Start `argv`; its standard output and error go to `output_fd`, its input is empty.

        On `info_fd`, closed here, the mechanism tells the first process of the tree's PID namespace.
        """
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=output_fd,
            stderr=output_fd,
            pass_fds=tuple(pass_fds),
            start_new_session=True,
            cwd="/" if mark is None else folder / "work",
            env={"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "LC_ALL": "C", MARKER: str(folder)},
        )
        return cls(process, mark, info_fd)

    async def _find_init(self, info_fd: int) -> None:
        if self._mark is not None:
            os.close(info_fd)
            return
        pid = await _read_info(info_fd)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                self._init = _Ending(os.pidfd_open(pid))

    @property
    def over(self) -> bool:
        """True once the main process has ended."""
        return self._outer.over

    async def ended(self) -> None:
        """Wait until the main process has ended; what it started may still run."""
        await self._outer.wait()

    @property
    def exit_code(self) -> int:
        """The main process's exit code; only after `kill`; 128 + number for a signal."""
        if self._code is None:
            raise RuntimeError("the process tree has not ended yet")
        return self._code

    async def kill(self) -> None:
        """End every process of the tree and wait until all are gone. Harmless when repeated."""
        if self._code is not None:
            return
        await asyncio.wait({self._finding}, timeout=_INFO_TIMEOUT_S)
        if not self._outer.over:
            self._outer.kill()
            await self._outer.wait()
        await self._finding
        if self._init is not None:
            # Ends last of its namespace: once it is gone, so is everything in there.
            self._init.kill()
            await self._init.wait()
            self._init.close()
        if self._mark is not None:
            await asyncio.to_thread(self._mark.kill_all)
        self._outer.close()
        self._code = self._reap()

    def _reap(self) -> int:
        code = self._process.wait()
        return code if code >= 0 else _SIGNAL_BASE - code


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """How processes are recognised that no PID namespace holds together."""

    entry: str
    """`NAME=value` in the environment they were started with."""
    folder: Path | None = None
    """A process without a terminal that stands in this folder counts as well: it may have dropped the marker.
    A person's shell has a terminal and is spared."""

    def fits(self, pid: int) -> bool:
        """Say whether the process carries the mark."""
        with contextlib.suppress(OSError):
            if self.entry.encode() in _read(f"/proc/{pid}/environ").split(b"\0"):
                return True
            if self.folder is not None and Path(f"/proc/{pid}/cwd").readlink().is_relative_to(self.folder):
                after_name = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
                return after_name[_TTY_FIELD] == b"0"
        return False

    def kill_all(self) -> int:
        """Kill every process that carries the mark, repeating until a look finds none; return how many. Blocking.

        Only processes that this user may read are found: those of the same user, or all for root. Raises
        `TimeoutError` when they multiply faster than they die.
        """
        killed = 0
        for _ in range(_KILL_ROUNDS):
            pids = [int(proc.name) for proc in Path("/proc").iterdir() if proc.name.isdigit()]
            found = [pid for pid in pids if pid != os.getpid() and self.fits(pid)]
            if not found:
                return killed
            killed += sum(self._kill(pid) for pid in found)
        raise TimeoutError(f"processes with {self.entry} keep coming back")

    def _kill(self, pid: int) -> bool:
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(pid)
            try:
                if not self.fits(pid):
                    return False
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                _wait_pidfd(pidfd)
                return True
            finally:
                os.close(pidfd)
        return False


def _read(path: str) -> bytes:
    """Read a small file of the kernel's; a look at every process is part of every release, so it has to be quick."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = []
        while part := os.read(fd, 65536):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(fd)


def _wait_pidfd(pidfd: int, timeout_ms: int = 5000) -> None:
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    poller.poll(timeout_ms)
