"""A sandbox on this machine: one folder, and process trees that see nothing else of the machine."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from functools import partial
from typing import TYPE_CHECKING

from orchestrator import errors
from orchestrator.sandbox.base import CommandResult, Isolation
from orchestrator.sandbox.confined_files import ConfinedFiles
from orchestrator.sandbox.isolation import MARKER, TREE_MARKER, Mount, launch_argv, private_mount
from orchestrator.sandbox.output_capture import OutputCapture
from orchestrator.sandbox.process_tree import Mark, ProcessTree
from orchestrator.sandbox.session import open_session

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from orchestrator.sandbox.isolation import View
    from orchestrator.sandbox.session import BashSession

META = "sandbox.json"
"""Written last: a folder without it is not a sandbox yet, or no more."""
_SHELL_STATE = ".rollout-shell"
_ENTER = 'printf + >&$1; eval "exec $1>&-"; cd -- "$2" || exit 1; shift 2; exec "$@"'


def sandbox_mark(folder: Path, isolation: Isolation | None) -> Mark:
    """Return what the processes of a sandbox are known by; `isolation` is None when nobody knows any more."""
    loose = isolation in {Isolation.NONE, None}
    return Mark(entry=f"{MARKER}={folder}", folder=folder if loose else None)


class LocalSandbox:
    """See `base.Sandbox`; made by `LocalProvider` only."""

    def __init__(
        self, key: str, provider_id: str, view: View, *, limit_script: str, cgroup_files: Sequence[Path]
    ) -> None:
        self.key = key
        self.provider_id = provider_id
        self.isolation = view.isolation
        self.workdir = view.workdir
        self.private_dir = view.private_dir
        self.base_commit = ""
        """The one commit of the prepared repository."""
        self._view = view
        self._launcher = "; ".join([limit_script, *[f"echo 0 > '{f}'" for f in cgroup_files], 'exec "$@"'])
        self._session: BashSession | None = None
        self.continues = False
        """The next shell session begins where the last one of an earlier worker stopped."""
        self._session_lock = asyncio.Lock()
        self._running: set[ProcessTree] = set()
        mounts = (*view.mounts, private_mount(view.folder))
        if view.isolation is Isolation.NONE:
            mounts = (Mount(inside=str(view.folder), outside=str(view.folder), writable=True),)
        self._files = ConfinedFiles(mounts, view.links)

    async def shell(self, command: str, *, timeout_s: float, output_limit: int = 1_000_000) -> CommandResult:
        """See `base.Sandbox.shell`."""
        async with self._session_lock:
            session = await self._live_session()
            try:
                result = await session.run(command, timeout_s=timeout_s, output_limit=output_limit)
            except BaseException:
                await asyncio.shield(asyncio.ensure_future(self._end_session()))
                raise
            if session.over:
                lost = not session.began and not result.timed_out
                await self._end_session()
                if lost:
                    raise errors.SandboxLost(f"sandbox {self.key} starts no shell: {_text(result.output)}")
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
        """See `base.Sandbox.run`."""
        await self._require_folder()
        started = time.monotonic()
        output_r, output_w = os.pipe()
        begun_r, begun_w = os.pipe()
        enter = ["/bin/bash", "-c", _ENTER, "enter", str(begun_w), cwd or self.workdir, *argv]
        try:
            tree = self._launch(
                enter, output_w, [begun_w], env={**self._view.env, **(env or {})}, private=private
            )
        except BaseException:
            os.close(output_r)
            os.close(begun_r)
            raise
        finally:
            os.close(output_w)
            os.close(begun_w)
        capture = OutputCapture(output_r)
        capture.begin(output_limit)
        self._running.add(tree)
        try:
            timed_out = await _finish(tree, timeout_s)
            output, total = capture.take()
            if not timed_out and not os.read(begun_r, 1):
                raise errors.SandboxLost(f"sandbox {self.key} starts no program: {_text(output)}")
        finally:
            await asyncio.shield(asyncio.ensure_future(tree.kill()))
            self._running.discard(tree)
            capture.close()
            os.close(begun_r)
        return CommandResult(
            exit_code=None if timed_out else tree.exit_code,
            output=output,
            output_bytes=total,
            timed_out=timed_out,
            duration_s=time.monotonic() - started,
        )

    async def read(self, path: str, *, limit: int = 64 * 1024 * 1024) -> bytes:
        """See `base.Sandbox.read`."""
        await self._require_folder()
        return await asyncio.to_thread(self._files.read, path, limit)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """See `base.Sandbox.write`."""
        await self._require_folder()
        await asyncio.to_thread(self._files.write, path, data, mode)

    async def stop(self) -> None:
        """See `base.Sandbox.stop`."""
        await self.detach()
        await asyncio.to_thread(sandbox_mark(self._view.folder, self.isolation).kill_all)

    async def alive(self) -> bool:
        """See `base.Sandbox.alive`."""
        try:
            return (await self.run(["true"], timeout_s=30, cwd="/")).exit_code == 0
        except errors.SandboxLost:
            return False

    async def detach(self) -> None:
        """See `base.Sandbox.detach`."""
        for tree in list(self._running):
            await tree.kill()
        if self._session is not None:
            await self._session.end()
            if not self._session_lock.locked():
                await self._end_session()

    async def _require_folder(self) -> None:
        if not await asyncio.to_thread((self._view.folder / META).exists):
            raise errors.SandboxLost(f"sandbox {self.key} is gone: {self._view.folder} was removed")

    async def _live_session(self) -> BashSession:
        if self._session is not None and self._session.over:
            await self._end_session()
        if self._session is None:
            await self._require_folder()
            restore, self.continues = self.continues, False
            self._session = open_session(
                partial(self._launch, env=self._view.env, private=False),
                f"{self._view.env['HOME']}/{_SHELL_STATE}",
                restore=restore,
            )
        return self._session

    async def _end_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.end()
            session.close()

    def _launch(
        self,
        argv: Sequence[str],
        output_fd: int,
        pass_fds: Sequence[int],
        *,
        env: Mapping[str, str],
        private: bool,
    ) -> ProcessTree:
        info_r, info_w = os.pipe()
        mark = None
        if self.isolation is Isolation.NONE:
            tree_id = secrets.token_hex(8)
            mark = Mark(entry=f"{TREE_MARKER}={tree_id}")
            env = {**env, MARKER: str(self._view.folder), TREE_MARKER: tree_id}
        try:
            command = launch_argv(self._view, argv, env=env, info_fd=info_w, private=private)
            return ProcessTree.launch(
                ["/bin/bash", "-c", self._launcher, "launch", *command],
                output_fd=output_fd,
                pass_fds=[*pass_fds, info_w] if mark is None else pass_fds,
                info_fd=info_r,
                folder=self._view.folder,
                mark=mark,
            )
        except OSError as error:
            os.close(info_r)
            raise errors.SandboxLost(f"sandbox {self.key} starts no process: {error}") from error
        finally:
            os.close(info_w)


async def _finish(tree: ProcessTree, timeout_s: float) -> bool:
    """Wait for the tree, or kill it when its time is over; say whether that happened."""
    try:
        async with asyncio.timeout(timeout_s):
            await tree.ended()
    except TimeoutError:
        await tree.kill()
        return True
    await tree.kill()
    return False


def _text(output: bytes) -> str:
    return output[-500:].decode(errors="replace").strip() or "no message"
