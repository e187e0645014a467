"""The persistent bash of a sandbox: directory, variables and functions last from one command to the next.

Bash reads its commands as a script from a pipe, one `eval` each, and reports every status on a pipe of its own that
commands cannot reach: neither an `exit`, a `break` nor an unbalanced quote in a command confuses the two.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from typing import TYPE_CHECKING

from orchestrator import errors
from orchestrator.sandbox.base import CommandResult
from orchestrator.sandbox.output_capture import OutputCapture

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from orchestrator.sandbox.process_tree import ProcessTree

    Starter = Callable[[Sequence[str], int, Sequence[int]], "ProcessTree"]

_USAGE_STATUS = 2
_CORRUPTING = b"unexpected EOF while looking for matching `)'"
"""Bash 5.2 corrupts its heap when `eval` meets an open `$(`, and dies within the next command: better end it now."""


def quote(text: str) -> str:
    """Quote for bash: single quotes, each one inside closed, escaped and opened again."""
    return "'" + text.replace("'", "'\\''") + "'"


class BashSession:
    """One bash in one process tree. Not shared by concurrent calls: the sandbox holds a lock."""

    def __init__(self, tree: ProcessTree, capture: OutputCapture, script_fd: int, status_fd: int) -> None:
        self._tree = tree
        self._capture = capture
        self._script_fd = script_fd
        self._status_fd = status_fd
        self._status = bytearray()
        self._news = asyncio.Event()
        self._closed = False
        os.set_blocking(script_fd, False)
        os.set_blocking(status_fd, False)
        asyncio.get_running_loop().add_reader(status_fd, self._on_status)

    @property
    def over(self) -> bool:
        """True when bash has ended; the next command needs a new session."""
        return self._closed or self._tree.over

    @property
    def began(self) -> bool:
        """True once bash said that it runs inside the sandbox."""
        return self._status.startswith(b"ready\n")

    async def run(self, command: str, *, timeout_s: float, output_limit: int) -> CommandResult:
        """Run one command. Over time, or when bash dies by it, the whole session ends with everything in it."""
        started = time.monotonic()
        if "\0" in command:
            text = b"bash: the command contains a NUL byte\n"
            return _result(_USAGE_STATUS, text, len(text), started, timed_out=False)
        self._capture.begin(output_limit)
        answers = self._answers()
        try:
            async with asyncio.timeout(timeout_s):
                await self._send(command)
                await self._answer(answers + 1)
        except TimeoutError:
            await self.end()
            return _result(None, *self._capture.take(), started, timed_out=True)
        if self._answers() <= answers:
            await self.end()
            return _result(self._tree.exit_code, *self._capture.take(), started, timed_out=False)
        status = int(self._status.split(b"\n")[answers + 1])
        result = _result(status, *self._capture.take(), started, timed_out=False)
        if status == _USAGE_STATUS and _CORRUPTING in result.output:
            await self.end()
        return result

    async def end(self) -> None:
        """Kill every process of the session and wait until they are gone; output stays readable."""
        await self._tree.kill()

    def close(self) -> None:
        """Close the descriptors. Harmless when repeated."""
        if self._closed:
            return
        self._closed = True
        asyncio.get_running_loop().remove_reader(self._status_fd)
        self._capture.close()
        os.close(self._script_fd)
        os.close(self._status_fd)

    def _on_status(self) -> None:
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._status_fd, 65536)
            if not data:
                asyncio.get_running_loop().remove_reader(self._status_fd)
            self._status += data
            self._news.set()

    def _answers(self) -> int:
        """Count the statuses reported so far; the first line only says that bash runs."""
        return max(0, self._status.count(b"\n") - 1)

    async def _send(self, command: str) -> None:
        # Redirecting the eval undoes whatever `exec >file` the command did to the session. The empty line lets
        # bash's parser recover from an unterminated quote, the braces keep `set -x` from tracing our own call.
        text = (
            f"eval {quote(command)} >&5 2>&5 3>&- 5>&- </dev/null\n\n"
            '{ __rollout_status "$?"; } 2>/dev/null\n'
        )
        await _write_all(self._script_fd, text.encode("utf-8", "surrogateescape"), self._tree)

    async def _answer(self, wanted: int) -> None:
        dead = asyncio.ensure_future(self._tree.ended())
        try:
            while self._answers() < wanted and not dead.done():
                self._news.clear()
                news = asyncio.ensure_future(self._news.wait())
                try:
                    await asyncio.wait({news, dead}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    news.cancel()
            self._on_status()
        finally:
            dead.cancel()


def _result(code: int | None, output: bytes, total: int, started: float, *, timed_out: bool) -> CommandResult:
    return CommandResult(
        exit_code=code,
        output=output,
        output_bytes=total,
        timed_out=timed_out,
        duration_s=time.monotonic() - started,
    )


async def _write_all(fd: int, data: bytes, tree: ProcessTree) -> None:
    """Write to a non-blocking pipe; stops early when its reader is gone, which the caller learns from the tree."""
    loop = asyncio.get_running_loop()
    view = memoryview(data)
    while view and not tree.over:
        try:
            view = view[os.write(fd, view) :]
        except BrokenPipeError:
            return
        except BlockingIOError:
            room = asyncio.Event()
            loop.add_writer(fd, room.set)
            try:
                await room.wait()
            finally:
                loop.remove_writer(fd)


def open_session(start: Starter, state: str, *, restore: bool) -> BashSession:
    """Start bash through `start(argv, output_fd, pass_fds)`, which keeps no descriptor.

    After every command its directory, exported variables and functions are kept in the file `state`, a path inside
    the sandbox; with `restore` the session begins with what an earlier one left there. Raises `errors.SandboxLost`
    when no descriptor is left.
    """
    try:
        output_r, output_w = os.pipe()
        script_r, script_w = os.pipe()
        status_r, status_w = os.pipe()
    except OSError as error:
        raise errors.SandboxLost(f"no descriptors for a shell session: {error}") from error
    file = quote(state)
    begin = f". {file} </dev/null >/dev/null 2>&1" if restore else f": >| {file}"
    prelude = (
        f"exec 3>&{status_w} 5>&1; exec {status_w}>&- {script_r}<&-\n"
        f"{{ {begin}; }} 2>/dev/null 3>&- 5>&-\n"
        f"__rollout_keep() {{ builtin printf 'builtin cd -- %q\\n' \"$PWD\"; builtin export -p; builtin declare -f; }} >| {file}\n"
        '__rollout_status() { __rollout_keep || :; builtin printf "%s\\n" "$1" >&3; return "$1"; }\n'
        'builtin printf "ready\\n" >&3\n'
    )
    os.write(script_w, prelude.encode())
    argv = ["/bin/bash", "--noprofile", "--norc", f"/dev/fd/{script_r}"]
    try:
        tree = start(argv, output_w, [script_r, status_w])
    except BaseException:
        for fd in (output_r, script_w, status_r):
            os.close(fd)
        raise
    finally:
        for fd in (output_w, script_r, status_w):
            os.close(fd)
    return BashSession(tree, OutputCapture(output_r), script_w, status_r)
