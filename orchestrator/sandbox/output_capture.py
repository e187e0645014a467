"""Keeps the first and last bytes of what a sandbox prints, reading always, so that nothing in it blocks on a pipe.

A pipe and not a file, because `echo x > /dev/stderr` truncates a file that stands behind standard error.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque

_CHUNK = 65536
_BURST = 8 * 1024 * 1024
_REST_S = 0.05
_DRAIN_LIMIT = 4 * 1024 * 1024
_IDLE_LIMIT = 65536
"""Bytes kept of what detached children print between two commands."""


class OutputCapture:
    """Reads one non-blocking descriptor until it is closed. At most 160 MB a second, so that the loop stays fair."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._burst = 0
        self._open = True
        self._reset(_IDLE_LIMIT)
        os.set_blocking(fd, False)
        self._loop.add_reader(fd, self._on_readable)

    def _reset(self, limit: int) -> None:
        self._head = bytearray()
        self._head_limit = limit - limit // 2
        self._tail: deque[bytes] = deque()
        self._tail_size = 0
        self._tail_limit = limit // 2
        self.total = 0

    def begin(self, limit: int) -> None:
        """Start a new command with its own cap; what came since the last one counts as its beginning."""
        late, total = self._joined(), self.total
        self._reset(limit)
        self._keep(late)
        self.total = total

    def take(self) -> tuple[bytes, int]:
        """Read what already lies in the pipe and return the capped bytes and how many there were in all."""
        drained = 0
        while self._open and drained < _DRAIN_LIMIT:
            count = self._read()
            if not count:
                break
            drained += count
        result = self._joined(), self.total
        self._reset(_IDLE_LIMIT)
        return result

    def close(self) -> None:
        """Stop reading and close the descriptor. Harmless when repeated."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._open:
            self._open = False
            self._loop.remove_reader(self._fd)
            os.close(self._fd)

    def _on_readable(self) -> None:
        self._burst += self._read()
        if self._open and self._burst >= _BURST:
            self._burst = 0
            self._loop.remove_reader(self._fd)
            self._timer = self._loop.call_later(_REST_S, self._resume)

    def _resume(self) -> None:
        self._timer = None
        if self._open:
            self._loop.add_reader(self._fd, self._on_readable)

    def _read(self) -> int:
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._fd, _CHUNK)
            if not data:
                self.close()
            self._keep(data)
            return len(data)
        return 0

    def _keep(self, data: bytes) -> None:
        self.total += len(data)
        room = self._head_limit - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if not data:
            return
        self._tail.append(data)
        self._tail_size += len(data)
        while self._tail and self._tail_size - len(self._tail[0]) >= self._tail_limit:
            self._tail_size -= len(self._tail.popleft())

    def _joined(self) -> bytes:
        tail = b"".join(self._tail)
        return bytes(self._head) + (tail[-self._tail_limit :] if self._tail_limit else b"")
