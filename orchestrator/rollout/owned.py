"""A sandbox in the hands of a rollout's owner: nothing is done in it by somebody who may have lost the rollout.

Whoever stood still (a stopped process, a machine that slept) goes on in the middle of a step and cannot know what it missed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from orchestrator.sandbox.base import CommandResult, Sandbox


class OwnedSandbox:
    """See `base.Sandbox`; `sure` returns once the rollout is known to be its owner's."""

    def __init__(self, sandbox: Sandbox, sure: Callable[[], Awaitable[None]]) -> None:
        self.key = sandbox.key
        self.provider_id = sandbox.provider_id
        self.isolation = sandbox.isolation
        self.workdir = sandbox.workdir
        self.private_dir = sandbox.private_dir
        self._sandbox = sandbox
        self._sure = sure

    async def shell(self, command: str, *, timeout_s: float, output_limit: int = 1_000_000) -> CommandResult:
        """See `base.Sandbox.shell`."""
        await self._sure()
        return await self._sandbox.shell(command, timeout_s=timeout_s, output_limit=output_limit)

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
        """See `base.Sandbox.run`."""
        await self._sure()
        return await self._sandbox.run(
            argv, timeout_s=timeout_s, cwd=cwd, env=env, private=private, output_limit=output_limit
        )

    async def read(self, path: str, *, limit: int = 64 * 1024 * 1024) -> bytes:
        """See `base.Sandbox.read`."""
        return await self._sandbox.read(path, limit=limit)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """See `base.Sandbox.write`."""
        await self._sure()
        await self._sandbox.write(path, data, mode=mode)

    async def stop(self) -> None:
        """See `base.Sandbox.stop`."""
        await self._sure()
        await self._sandbox.stop()

    async def alive(self) -> bool:
        """See `base.Sandbox.alive`."""
        return await self._sandbox.alive()

    async def detach(self) -> None:
        """See `base.Sandbox.detach`."""
        await self._sandbox.detach()
