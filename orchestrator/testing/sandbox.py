"""A sandbox without walls: plain processes in a folder. For trying out agents and graders, never for real code."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator import errors
from orchestrator.sandbox.base import NON_INTERACTIVE_ENV, CommandResult, Isolation

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Keeps directory and exported variables between calls, which is all that a session promises.
_SESSION = """
[ -f "$STATE" ] && . "$STATE"
eval "$1"
rc=$?
{ declare -px; printf 'cd %q\\n' "$PWD"; } > "$STATE"
exit $rc
"""


class FakeSandbox:
    """Runs everything in `folder`, whose `work` is the repository."""

    isolation = Isolation.NONE

    def __init__(self, folder: Path, *, lose_at: str | None = None, alive_after: bool = False) -> None:
        self.key = "fake"
        self.provider_id = "fake"
        self.workdir = str(folder / "work")
        self.private_dir = str(folder / "private")
        self.lose_at = lose_at
        """A command that ends the sandbox: from then on every call raises `errors.SandboxLost`."""
        self.alive_after = alive_after
        """What `alive` says after that."""
        self.lost = False
        self._state = folder / "session"
        for needed in (self.workdir, self.private_dir):
            Path(needed).mkdir(parents=True, exist_ok=True)

    async def shell(self, command: str, *, timeout_s: float, output_limit: int = 1_000_000) -> CommandResult:
        """Run one command; the directory and exported variables last."""
        self.lost = self.lost or command == self.lose_at
        result = await self.run(
            ["bash", "-c", _SESSION, "bash", command],
            timeout_s=timeout_s,
            env={"STATE": str(self._state)},
            output_limit=output_limit,
        )
        if result.timed_out:
            await asyncio.to_thread(self._state.unlink, missing_ok=True)
        return result

    async def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        private: bool = False,
        output_limit: int = 1_000_000,
    ) -> CommandResult:
        """Run one program in a process group of its own, which is killed at the end."""
        self._check()
        started = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            *argv,
            cwd=cwd or self.workdir,
            env={"PATH": os.defpath, "HOME": self.workdir, **NON_INTERACTIVE_ENV, **(env or {})},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        reading = asyncio.ensure_future(process.communicate())
        try:
            done, _ = await asyncio.wait({reading}, timeout=timeout_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            output, _ = await reading
        kept = output
        if len(output) > output_limit:
            half = output_limit // 2
            kept = output[:half] + output[len(output) - half :]
        return CommandResult(
            exit_code=process.returncode if done else None,
            output=kept,
            output_bytes=len(output),
            timed_out=not done,
            duration_s=time.monotonic() - started,
        )

    async def read(self, path: str, *, limit: int = 64 * 1024 * 1024) -> bytes:
        """Return a file's bytes."""
        self._check()
        data = await asyncio.to_thread(Path(path).read_bytes)
        if len(data) > limit:
            raise ValueError(f"{path} is larger than {limit} bytes")
        return data

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Replace a file."""
        self._check()
        await asyncio.to_thread(_replace, Path(path), data, mode)

    async def stop(self) -> None:
        """Nothing outlives its call here."""
        self._check()

    async def alive(self) -> bool:
        """Say whether the sandbox can run commands."""
        return self.alive_after if self.lost else True

    async def detach(self) -> None:
        """There is nothing to let go of."""

    def _check(self) -> None:
        if self.lost:
            raise errors.SandboxLost("the fake sandbox is gone, as it was told to be")


def _replace(path: Path, data: bytes, mode: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    path.chmod(mode)
