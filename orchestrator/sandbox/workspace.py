"""Puts a task's base tree into a sandbox folder and gives it a repository with exactly one commit.

History leaks the fix, so none comes along. Git never runs on the unpacked tree outside the sandbox: only the user's
own source repository is read here, everything else happens inside.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator import errors
from orchestrator.sandbox.session import quote

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from typing import BinaryIO

    from orchestrator.sandbox.base import CommandResult
    from orchestrator.tasks.record import RepoSource, Task

    RunScript = Callable[[str, Mapping[str, str], bool], Awaitable[CommandResult]]
    """Run bash text inside the sandbox: (script, more variables, private)."""

_GIT_ENV: Mapping[str, str] = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_AUTHOR_NAME": "t",
    "GIT_AUTHOR_EMAIL": "t@t",
    "GIT_COMMITTER_NAME": "t",
    "GIT_COMMITTER_EMAIL": "t@t",
    "GIT_AUTHOR_DATE": "2000-01-01T00:00:00Z",
    "GIT_COMMITTER_DATE": "2000-01-01T00:00:00Z",
}
"""Identity and dates are constants, so that equal trees give equal commits on every machine."""
_INIT = "set -eu; rm -rf .git; git init -q -b main --template=\n"
_COMMIT = (
    "git -c core.logAllRefUpdates=false commit -q --no-verify --allow-empty -m base; git rev-parse HEAD\n"
)
_EVERYTHING = _INIT + "git add -A -f .\n" + _COMMIT
_UNIGNORED = _INIT + "git add -A .\n" + _COMMIT
_PACK = "base.pack"
_FROM_PACK = (
    _INIT
    + "git index-pack --stdin < {pack} >/dev/null; rm -f {pack}\n"
    + 'commit=$(printf "base\\n" | git commit-tree {tree})\n'
    + 'git -c core.logAllRefUpdates=false update-ref refs/heads/main "$commit"\n'
    + "git read-tree main; git checkout-index -a -f -q; git update-index -q --refresh || true; git rev-parse HEAD\n"
)
_CHANGED = (
    'test "$(git rev-parse HEAD)" != {head} || test -n "$(git status --porcelain --ignored | head -c 1)"\n'
)
_TAIL = 2000
_CHUNK = 1024 * 1024


def check_servable(task: Task) -> RepoSource:
    """Return where the base tree comes from; raises `errors.TaskInvalid` when there is no such place here."""
    if task.repo_source is None:
        image = f"the container image {task.image}" if task.image else "no image and no repository"
        raise errors.TaskInvalid(
            f"{task.instance_id}: the local sandbox needs repo_archive or repo_path; the record names only {image}",
            hint="add repo_archive/repo_path to the record, or use --sandbox aenv",
        )
    if not task.repo_source.path.exists():
        raise errors.TaskInvalid(
            f"{task.instance_id}: its repository source {task.repo_source.path} does not exist"
        )
    return task.repo_source


async def prepare(task: Task, work: Path, private: Path, private_inside: str, run_script: RunScript) -> str:
    """Fill `work` with the base tree, commit it, run `pre_commands`; return the sandbox's base commit.

    Raises `errors.TaskInvalid` when the source does not give the commit the record names, or a command fails.
    """
    source = check_servable(task)
    if source.kind == "git":
        base = await _from_repository(task, source.path, private, private_inside, run_script)
    else:
        fill = _unpack if source.kind == "archive" else _copy
        await asyncio.to_thread(fill, task.instance_id, source, work)
        base = await _commit_tree(task, run_script)
    if task.pre_commands.strip():
        base = await _run_pre_commands(task, base, run_script)
    return base


async def _commit_tree(task: Task, run_script: RunScript) -> str:
    """Commit the whole tree; when that is not the named commit, the tree without what it ignores may be."""
    base = await _git(task, _EVERYTHING, run_script)
    if task.base_commit is None or base == task.base_commit:
        return base
    unignored = await _git(task, _UNIGNORED, run_script)
    if unignored == task.base_commit:
        return unignored
    raise errors.TaskInvalid(
        f"{task.instance_id}: the tree of its source makes base commit {base}, the record says {task.base_commit}",
        hint="rebuild the archive, or correct base_commit",
    )


async def _from_repository(
    task: Task, repository: Path, private: Path, private_inside: str, run_script: RunScript
) -> str:
    wanted = task.base_commit or "HEAD"
    code, tree, _ = await _source_git(
        repository, "rev-parse", "--verify", "--quiet", f"{wanted}^{{commit}}^{{tree}}"
    )
    if code != 0:
        raise errors.TaskInvalid(
            f"{task.instance_id}: the repository {repository} has no commit {wanted}",
            hint="fetch the commit into that repository, or correct base_commit",
        )
    name = tree.decode().strip()
    with (private / _PACK).open("wb") as pack:
        code, _, problem = await _source_git(
            repository, "pack-objects", "--revs", "--stdout", "-q", stdin=f"{name}\n".encode(), stdout=pack
        )
    if code != 0:
        text = problem.decode(errors="replace").strip()
        raise errors.TaskInvalid(f"{task.instance_id}: cannot read {wanted} from {repository}: {text}")
    script = _FROM_PACK.format(pack=quote(f"{private_inside}/{_PACK}"), tree=name)
    return await _git(task, script, run_script, private=True)


async def _source_git(
    repository: Path, *arguments: str, stdin: bytes = b"", stdout: BinaryIO | None = None
) -> tuple[int, bytes, bytes]:
    process = await asyncio.create_subprocess_exec(
        "git", "-c", "safe.directory=*", "-C", str(repository), *arguments,
        stdin=subprocess.PIPE, stdout=stdout or subprocess.PIPE, stderr=subprocess.PIPE,
        env={"PATH": "/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0", **_GIT_ENV},
    )  # fmt: skip
    try:
        out, problem = await process.communicate(stdin)
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    return process.returncode or 0, out or b"", problem


async def _git(task: Task, script: str, run_script: RunScript, *, private: bool = False) -> str:
    result = await run_script(script, _GIT_ENV, private)
    commit = result.output.decode(errors="replace").strip().rpartition("\n")[2]
    if result.exit_code != 0 or len(commit) not in {40, 64}:
        raise errors.SandboxCreateFailed(
            f"{task.instance_id}: the base commit could not be made (exit code {result.exit_code}): {_tail(result)}"
        )
    return commit


async def _run_pre_commands(task: Task, base: str, run_script: RunScript) -> str:
    result = await run_script(task.pre_commands, {}, False)
    if result.exit_code != 0:
        how = "ran out of time" if result.timed_out else f"ended with exit code {result.exit_code}"
        raise errors.TaskInvalid(f"{task.instance_id}: pre_commands {how}: {_tail(result)}")
    changed = await run_script(_CHANGED.format(head=base), _GIT_ENV, False)
    return base if changed.exit_code == 1 else await _git(task, _EVERYTHING, run_script)


def _tail(result: CommandResult) -> str:
    return result.output[-_TAIL:].decode(errors="replace").strip()


def _unpack(instance_id: str, source: RepoSource, work: Path) -> None:
    """Extract with the rules of tarfile's `data` filter (PEP 706): nothing lands or points outside the tree."""
    with source.path.open("rb") as file:
        if source.sha256 is not None:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest != source.sha256:
                raise errors.TaskInvalid(
                    f"{instance_id}: {source.path} has sha256 {digest}, the record says {source.sha256}",
                    hint="fetch the archive again",
                )
            file.seek(0)
        try:
            with tarfile.open(fileobj=file) as archive:
                archive.extractall(work, filter=_without_git)  # noqa: S202 - the filter refuses what S202 warns of
        except (tarfile.TarError, OSError, EOFError) as error:
            raise errors.TaskInvalid(f"{instance_id}: {source.path} cannot be unpacked: {error}") from error


def _without_git(member: tarfile.TarInfo, destination: str) -> tarfile.TarInfo | None:
    if any(part.lower() == ".git" for part in Path(member.name).parts):
        return None
    return tarfile.data_filter(member, destination)


def _copy(instance_id: str, source: RepoSource, work: Path) -> None:
    try:
        shutil.copytree(
            source.path, work, symlinks=True, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".git")
        )
    except (shutil.Error, OSError) as error:
        raise errors.TaskInvalid(f"{instance_id}: {source.path} cannot be copied: {error}") from error
