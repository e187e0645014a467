"""Sandboxes on this machine, without docker or a cluster: a folder each, kept apart by bubblewrap or `unshare`.

The folder is named after the key, so that any process can find and remove the sandbox of a worker that died.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from orchestrator import errors
from orchestrator.sandbox import cgroups, isolation, local_place, python_env, workspace
from orchestrator.sandbox.base import NON_INTERACTIVE_ENV, Instance, Isolation
from orchestrator.sandbox.isolation import View
from orchestrator.sandbox.local_sandbox import META, LocalSandbox, sandbox_mark

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from orchestrator.sandbox.base import CommandResult, SandboxSpec
    from orchestrator.sandbox.python_env import TaskPython
    from orchestrator.settings import SandboxSettings

logger = logging.getLogger(__name__)

_P = ParamSpec("_P")
_T = TypeVar("_T")
_PROBE_KEY = "preflight"
_PARTS = ("work", "home", "tmp", "shm", "private", "root")
_INSTALL_HINT = (
    "apt-get install bubblewrap (or your system's package of that name), or pass --allow-no-isolation"
)


class LocalProvider:
    """Makes, finds and removes local sandboxes; see `base.SandboxProvider`.

    `cache_dir` keeps the Python environment for tasks. Several providers, in one process or many, may share a root.
    """

    name = "local"
    creates_late = False

    def __init__(self, settings: SandboxSettings, *, cache_dir: Path) -> None:
        self._settings = settings
        self._cache_dir = cache_dir
        self._root = (settings.root or Path(tempfile.gettempdir()) / "areal-sweagent").absolute()
        self._lock = asyncio.Lock()
        self._isolation: Isolation | None = None
        self._python: TaskPython | None = None
        self._hierarchies: tuple[cgroups.Hierarchy, ...] = ()
        self._held: dict[str, list[LocalSandbox]] = {}
        """Sandboxes of this process, so that releasing one also lets go of its shell."""

    @property
    def ref(self) -> str:
        """See `base.SandboxProvider.ref`.

        Makes the root, and looks at it every time: one that was swept away and made again is another authority.
        """
        local_place.make_root(self._root)
        return local_place.name(self._root)

    @property
    def gaps(self) -> tuple[str, ...]:
        """See `base.SandboxProvider.gaps`."""
        capped = self._settings.processes is not None
        return cgroups.gaps(self._hierarchies, user_id=os.geteuid()) if self._isolation and capped else ()

    async def preflight(self) -> Isolation:
        """Find the strongest mechanism that really runs a program here; the answer is kept.

        Raises `errors.IsolationRefused` when none does and going without was not allowed.
        """
        async with self._lock:
            if self._isolation is None:
                await asyncio.to_thread(local_place.make_root, self._root)
                await asyncio.to_thread(_sweep_probes, self._root)
                self._hierarchies = await asyncio.to_thread(cgroups.find_hierarchies)
                self._python = await python_env.find(self._settings.python, self._cache_dir)
                self._isolation = await self._choose()
                for gap in self.gaps:
                    logger.warning("sandboxes on this machine: %s", gap)
            return self._isolation

    async def create(self, spec: SandboxSpec) -> LocalSandbox:
        """See `base.SandboxProvider.create`."""
        workspace.check_servable(spec.task)
        await self.preflight()
        folder = local_place.folder_of(self._root, spec.key)
        try:
            await _to_the_end(folder.mkdir, 0o700)
        except FileExistsError as error:
            raise errors.SandboxCreateFailed(f"a sandbox with the key {spec.key} already exists") from error
        except OSError as error:
            raise errors.SandboxCreateFailed(f"sandbox {spec.key} could not be made: {error}") from error
        except asyncio.CancelledError:
            await asyncio.shield(asyncio.ensure_future(self.release(spec.key)))
            raise
        try:
            async with asyncio.timeout(spec.create_timeout_s):
                await _to_the_end(_make_parts, folder)
                return await self._fill(spec, folder)
        except BaseException as error:
            await asyncio.shield(asyncio.ensure_future(self.release(spec.key)))
            if isinstance(error, TimeoutError | OSError | errors.SandboxLost):
                raise errors.SandboxCreateFailed(
                    f"sandbox {spec.key} could not be made: {error!r}"
                ) from error
            raise

    async def attach(self, spec: SandboxSpec, provider_id: str) -> LocalSandbox:
        """See `base.SandboxProvider.attach`."""
        kept = await self.preflight()
        folder = local_place.folder_of(self._root, spec.key)
        try:
            meta = json.loads(await asyncio.to_thread((folder / META).read_text))
        except (FileNotFoundError, ValueError) as error:
            raise errors.SandboxLost(f"sandbox {spec.key} is gone: no {folder / META}") from error
        if (provider_id, kept.value) != (meta["provider_id"], meta["isolation"]):
            raise errors.SandboxLost(f"sandbox {spec.key} in {folder} is another one than {provider_id}")
        sandbox = await self._sandbox(spec, folder)
        sandbox.base_commit = meta["base_commit"]
        sandbox.continues = True
        return sandbox

    async def release(self, key: str, ref: str | None = None) -> str:
        """See `base.SandboxProvider.release`."""
        place = await asyncio.to_thread(self._place, ref)
        folder = place.folder(key)
        await self._let_go(str(folder))
        try:
            if not self._hierarchies:
                self._hierarchies = await asyncio.to_thread(cgroups.find_hierarchies)
            return await asyncio.to_thread(self._remove, key, place)
        except (TimeoutError, OSError) as error:
            raise errors.SandboxLost(f"sandbox {key} could not be released: {error}") from error

    async def list_ours(self, prefix: str, ref: str | None = None) -> list[Instance]:
        """See `base.SandboxProvider.list_ours`."""

        def listed() -> tuple[Path, list[str]]:
            place = self._place(ref)
            return place.root, sorted(entry.name for entry in place.root.iterdir()) if place.there else []

        try:
            root, names = await asyncio.to_thread(listed)
        except OSError as error:
            raise errors.SandboxLost(f"the folder of local sandboxes cannot be looked at: {error}") from error
        ours = [name for name in names if name.startswith(prefix) and local_place.KEY.fullmatch(name)]
        return [Instance(key=name, provider_id=str(root / name)) for name in ours]

    async def close(self) -> None:
        """See `base.SandboxProvider.close`."""
        for folder in list(self._held):
            await self._let_go(folder)

    async def _let_go(self, folder: str) -> None:
        for sandbox in self._held.pop(folder, []):
            await sandbox.detach()

    def _place(self, ref: str | None) -> local_place.Place:
        try:
            return local_place.locate(self.ref if ref is None else ref)
        except OSError as error:
            raise errors.SandboxLost(f"the folder of local sandboxes cannot be looked at: {error}") from error

    async def _choose(self) -> Isolation:
        wanted = self._settings.isolation
        names = [Isolation.BWRAP, Isolation.UNSHARE] if wanted == "auto" else [Isolation(wanted)]
        problems = []
        for name in names:
            if name is Isolation.NONE:
                continue
            problem = await self._probe(name)
            if problem is None:
                return name
            problems.append(f"{name}: {problem}")
        if self._settings.allow_no_isolation and wanted in {"auto", "none"}:
            return Isolation.NONE
        if not problems:
            raise errors.IsolationRefused(
                "sandbox.isolation is set to 'none'",
                hint=f"set it to auto and, if that finds nothing, {_INSTALL_HINT}",
            )
        raise errors.IsolationRefused(
            f"sandboxes cannot be kept apart on this machine ({'; '.join(problems)})", hint=_INSTALL_HINT
        )

    async def _probe(self, name: Isolation) -> str | None:
        """Start the task Python inside a throw-away sandbox; return what went wrong, or None."""
        folder = Path(
            await asyncio.to_thread(tempfile.mkdtemp, prefix=local_place.PROBE_PREFIX, dir=self._root)
        )
        try:
            await asyncio.to_thread(_make_parts, folder)
            await asyncio.to_thread((folder / META).touch)
            view = self._view(folder, "/testbed", name, network=False)
            sandbox = LocalSandbox(_PROBE_KEY, "", view, limit_script="true", cgroup_files=())
            result = await sandbox.run(
                [str(self._task_python().executable), "-I", "-c", "pass"], timeout_s=30
            )
        except errors.SandboxLost as error:
            return str(error)
        finally:
            await asyncio.to_thread(local_place.delete, folder)
        if result.exit_code == 0:
            return None
        return f"exit code {result.exit_code} {result.output[-200:].decode(errors='replace').strip()}"

    async def _fill(self, spec: SandboxSpec, folder: Path) -> LocalSandbox:
        workdir = spec.task.workdir
        covered = [str(path) for path in self._read_only() if path.is_relative_to(workdir)]
        if covered or not isolation.is_usable_workdir(workdir):
            reason = (
                f"it would cover {covered[0]}" if covered else "it must be a plain path outside the system's"
            )
            raise errors.TaskInvalid(
                f"{spec.task.instance_id}: its workdir {workdir} cannot be a folder of a local sandbox: {reason}"
            )
        (folder / META).touch()
        sandbox = await self._sandbox(spec, folder)

        async def run_script(script: str, env: Mapping[str, str], private: bool) -> CommandResult:
            return await sandbox.run(
                ["/bin/bash", "-c", script], timeout_s=spec.create_timeout_s, env=env, private=private
            )

        sandbox.base_commit = await workspace.prepare(
            spec.task, folder / "work", folder / "private", sandbox.private_dir, run_script
        )
        meta = {
            "provider_id": sandbox.provider_id,
            "isolation": sandbox.isolation.value,
            "base_commit": sandbox.base_commit,
            "instance_id": spec.task.instance_id,
        }
        await asyncio.to_thread(_write_meta, folder, json.dumps(meta))
        return sandbox

    async def _sandbox(self, spec: SandboxSpec, folder: Path) -> LocalSandbox:
        kept = await self.preflight()
        files = await _to_the_end(cgroups.make_groups, self._hierarchies, folder, spec.limits)
        counted = any("pids" in h.controllers for h in self._hierarchies)
        cap = None if counted else spec.limits.processes
        sandbox = LocalSandbox(
            spec.key,
            str(folder),
            self._view(folder, spec.task.workdir, kept, network=spec.network),
            limit_script=isolation.limit_commands(spec.limits, cap_processes=cap),
            cgroup_files=files,
        )
        self._held.setdefault(str(folder), []).append(sandbox)
        return sandbox

    def _view(self, folder: Path, workdir: str, kept: Isolation, *, network: bool) -> View:
        python = self._task_python()
        mounts, links = isolation.system_mounts()
        home = isolation.HOME
        if kept is Isolation.NONE:
            workdir, home = str(folder / "work"), str(folder / "home")
        env = {
            "PATH": f"{python.bin_dir}:/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin",
            "HOME": home,
            "USER": "agent",
            "LOGNAME": "agent",
            "SHELL": "/bin/bash",
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "TMPDIR": str(folder / "tmp") if kept is Isolation.NONE else "/tmp",  # noqa: S108
            "GIT_CEILING_DIRECTORIES": str(Path(workdir).parent),
            **NON_INTERACTIVE_ENV,
        }
        return View(
            isolation=kept,
            workdir=workdir,
            folder=folder,
            mounts=(*mounts, *isolation.folder_mounts(folder, workdir, self._read_only(), network=network)),
            links=links,
            env=env,
            network=network,
        )

    def _task_python(self) -> TaskPython:
        if self._python is None:
            raise RuntimeError("preflight comes first")
        return self._python

    def _read_only(self) -> list[Path]:
        python = self._python.folders if self._python is not None else ()
        return [*python, *self._settings.read_only_paths]

    def _remove(self, key: str, place: local_place.Place) -> str:
        """Blocking: end the processes, then delete the folder, then look again."""
        folder = place.folder(key)
        if not place.there:
            return (
                f"{place.ref}: the machine has started again since, and {place.root} went with the old start"
            )
        killed = sandbox_mark(folder, _kept_isolation(folder)).kill_all()
        cgroups.remove_groups(self._hierarchies, folder)
        local_place.delete(folder)
        again = "; the machine has started again since" if place.rebooted else ""
        return (
            f"{place.ref}: no folder {folder}, no process of it ({killed} ended now), no cgroup of it{again}"
        )


def _sweep_probes(root: Path) -> None:
    """Blocking: remove what tries of workers that were killed left behind; what cannot be removed stays a warning."""
    for folder in local_place.stale_probes(root):
        try:
            sandbox_mark(folder, None).kill_all()
            local_place.delete(folder)
        except (TimeoutError, OSError) as error:
            logger.warning("the old folder %s of a preflight stays: %s", folder, error)


async def _to_the_end(work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Run blocking work in a thread; a cancellation is passed on only when it has ended, so that it can be undone."""
    running = asyncio.ensure_future(asyncio.to_thread(work, *args, **kwargs))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        running.exception()  # seen, so that nobody logs it as lost: the cancellation is what counts
        raise


def _make_parts(folder: Path) -> None:
    for part in _PARTS:
        (folder / part).mkdir(mode=0o700)
    isolation.write_etc(folder / "etc")


def _write_meta(folder: Path, text: str) -> None:
    temporary = folder / f"{META}.tmp"
    temporary.write_text(text)
    temporary.replace(folder / META)


def _kept_isolation(folder: Path) -> Isolation | None:
    try:
        return Isolation(json.loads((folder / META).read_text())["isolation"])
    except (OSError, ValueError, KeyError):
        return None
