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
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.sandbox.isolation import MARKER

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_SIGNAL_BASE = 128
_INFO_TIMEOUT_S = 30.0
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
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def close(self) -> None:
        if self._open:
            self._open = False
            self._loop.remove_reader(self.pidfd)
            os.close(self.pidfd)


async def read_to_end(fd: int) -> bytes:
    """Read a pipe until its last writer is gone, without blocking the loop. Closes the descriptor."""
    os.set_blocking(fd, False)
    loop = asyncio.get_running_loop()
    data = bytearray()
    done = asyncio.Event()

    def on_readable() -> None:
        with contextlib.suppress(BlockingIOError):
            chunk = os.read(fd, 65536)
            data.extend(chunk)
            if not chunk:
                loop.remove_reader(fd)
                done.set()

    loop.add_reader(fd, on_readable)
    try:
        await done.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)
    return bytes(data)


class ProcessTree:
    """A started tree. Whoever starts one awaits `finish` or `kill`: afterwards no process of it is left."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path | None) -> None:
        self._process = process
        self._folder = folder
        """Set only without a PID namespace: children are then found by their marker."""
        self._outer = _Ending(os.pidfd_open(process.pid))
        self._init: _Ending | None = None
        self._code: int | None = None

    @classmethod
    def launch(
        cls, argv: Sequence[str], *, output_fd: int, pass_fds: Sequence[int], folder: Path, isolated: bool
    ) -> ProcessTree:
        """Start `argv`; its standard output and error go to `output_fd`, its input is empty."""
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=output_fd,
            stderr=output_fd,
            pass_fds=tuple(pass_fds),
            start_new_session=True,
            cwd="/",
            env={"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "LC_ALL": "C", MARKER: str(folder)},
        )
        return cls(process, None if isolated else folder)

    async def find_init(self, info_fd: int) -> None:
        """Learn the first process of the tree's PID namespace from what the mechanism wrote."""
        async with asyncio.timeout(_INFO_TIMEOUT_S):
            text = await read_to_end(info_fd)
        if text:
            with contextlib.suppress(ProcessLookupError):
                self._init = _Ending(os.pidfd_open(json.loads(text)["child-pid"]))

    @property
    def over(self) -> bool:
        """True once the main process has ended."""
        return self._outer.over

    async def ended(self) -> None:
        """Wait until the main process has ended; what it started may still run."""
        await self._outer.wait()

    async def finish(self) -> int:
        """Wait for the main process, end the rest and return the exit code (128 + number for a signal)."""
        await self._outer.wait()
        await self.kill()
        return self.exit_code

    @property
    def exit_code(self) -> int:
        """The main process's exit code; only after `finish` or `kill`."""
        if self._code is None:
            raise RuntimeError("the process tree has not ended yet")
        return self._code

    async def kill(self) -> None:
        """End every process of the tree and wait until all are gone. Harmless when repeated."""
        if self._code is not None:
            return
        if self._init is not None:
            self._init.kill()
        if self._init is None or not self._outer.over:
            await self._end_outer()
        if self._init is not None:
            await self._init.wait()
            self._init.close()
        if self._folder is not None:
            await asyncio.to_thread(kill_marked, self._folder, standing=True)
        self._outer.close()
        self._code = self._reap()

    async def _end_outer(self) -> None:
        if self._init is not None:
            await self._init.wait()
        if not self._outer.over:
            self._outer.kill()
            await self._outer.wait()

    def _reap(self) -> int:
        code = self._process.wait()
        return code if code >= 0 else _SIGNAL_BASE - code


def _marked(folder: Path, *, standing: bool) -> Iterator[int]:
    for proc in Path("/proc").iterdir():
        if (
            proc.name.isdigit()
            and int(proc.name) != os.getpid()
            and is_marked(proc, folder, standing=standing)
        ):
            yield int(proc.name)


def is_marked(proc: Path, folder: Path, *, standing: bool) -> bool:
    """Say whether the process behind `/proc/PID` belongs to the sandbox in `folder`.

    With `standing`, a process without a terminal whose current directory lies there counts as well: it may have
    dropped the marker. A person's shell has a terminal and is spared.
    """
    with contextlib.suppress(OSError):
        if f"{MARKER}={folder}".encode() in (proc / "environ").read_bytes().split(b"\0"):
            return True
        if standing and (proc / "cwd").readlink().is_relative_to(folder):
            after_name = (proc / "stat").read_bytes().rpartition(b")")[2].split()
            return after_name[_TTY_FIELD] == b"0"
    return False


def kill_marked(folder: Path, *, standing: bool) -> int:
    """Kill every process of the sandbox in `folder`, repeating until a look finds none; return how many.

    Blocking. Only processes that this user may read are found: those of the same user, or all for root.
    Raises `TimeoutError` when they multiply faster than they die.
    """
    killed = 0
    for _ in range(_KILL_ROUNDS):
        found = list(_marked(folder, standing=standing))
        if not found:
            return killed
        killed += sum(_kill_one(pid, folder, standing=standing) for pid in found)
    raise TimeoutError(f"processes of the sandbox in {folder} keep coming back")


def _kill_one(pid: int, folder: Path, *, standing: bool) -> bool:
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        try:
            if not is_marked(Path("/proc") / str(pid), folder, standing=standing):
                return False
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            _wait_pidfd(pidfd)
            return True
        finally:
            os.close(pidfd)
    return False


def _wait_pidfd(pidfd: int, timeout_ms: int = 5000) -> None:
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    poller.poll(timeout_ms)
