"""Processes to kill: forked from one warm, single-threaded server, so that a fresh one costs milliseconds.

Each child runs one function of `scenarios` and speaks with the test over a socket, one JSON value a line.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[3]
_PATIENCE_S = 60.0


class Link:
    """One end of the line between a test and a child."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._rest = b""

    def say(self, value: object) -> None:
        """Send one value; it is in the kernel when this returns, whoever dies next."""
        self._end.sendall(json.dumps(value).encode() + b"\n")

    def hear(self) -> Any:
        """Return the other side's next value, None when it has gone."""
        while b"\n" not in self._rest:
            try:
                more = self._end.recv(1 << 16)
            except ConnectionResetError:
                more = b""
            if not more:
                return None
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)

    async def listen(self) -> Any:
        """Hear, off the event loop."""
        return await asyncio.to_thread(self.hear)

    def close(self) -> None:
        self._end.close()


class Child(Link):
    """The test's view of one process."""

    def __init__(self, end: socket.socket, pid: int, server: ForkServer) -> None:
        super().__init__(end)
        end.settimeout(_PATIENCE_S)
        self.pid = pid
        self._server = server
        self.exit_code: int | None = None

    def hear(self) -> Any:
        said = super().hear()
        if isinstance(said, dict) and "broke" in said:
            raise AssertionError(f"a child broke:\n{said['broke']}")
        return said

    def rest(self) -> list[Any]:
        """Return everything that is said until the process is gone."""
        said = []
        while (value := self.hear()) is not None:
            said.append(value)
        return said

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int:
        """Return the exit code, negative for a signal."""
        if self.exit_code is None:
            self.exit_code = self._server.wait(self.pid)
            self.close()
        return self.exit_code

    def end(self) -> int:
        """Hear the process out; it must end well."""
        self.rest()
        code = self.wait()
        assert code == 0, f"the child ended with {code}"
        return code

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.exit_code is None:
            self.signal(signal.SIGKILL)
            self.wait()

    def kill(self) -> int:
        self.signal(signal.SIGKILL)
        return self.wait()


class ForkServer:
    """Starts children. They die with the test process."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control = ours
        self._children: list[Child] = []
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.integration.durability.scenarios", str(theirs.fileno())],
                cwd=ROOT,
                pass_fds=[theirs.fileno()],
            )

    def start(self, scenario: str, **arguments: Any) -> Child:
        """Run `scenarios.<scenario>(link, **arguments)` in a new process."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [scenario.encode()], [theirs.fileno()])
        pid = int(self._control.recv(64))
        child = Child(ours, pid, self)
        self._children.append(child)
        child.say(arguments)
        return child

    def wait(self, pid: int) -> int:
        self._control.send(f"wait {pid}".encode())
        return int(self._control.recv(64))

    def close(self) -> None:
        for child in self._children:
            child.close()
        self._control.close()
        self._process.wait(timeout=_PATIENCE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(control: socket.socket, scenarios: dict[str, Any]) -> None:
    """Fork for every request until the test process is gone."""
    gc.freeze()  # else each child's collections copy the whole heap
    while True:
        request, fds, _, _ = socket.recv_fds(control, 256, 1)
        words = request.decode().split()
        if not words:
            return
        if words[0] == "wait":
            _, status = os.waitpid(int(words[1]), 0)
            control.send(str(os.waitstatus_to_exitcode(status)).encode())
            continue
        pid = os.fork()
        if pid == 0:
            control.close()
            _be_child(Link(socket.socket(fileno=fds[0])), scenarios[words[0]])
        os.close(fds[0])
        control.send(str(pid).encode())


def _be_child(link: Link, scenario: Any) -> None:
    code = 0
    try:
        asyncio.run(scenario(link, **link.hear()))
    except BaseException:  # noqa: BLE001 - the end of a process: told to the test
        link.say({"broke": traceback.format_exc()})
        code = 1
    finally:
        sys.stderr.flush()
        os._exit(code)
