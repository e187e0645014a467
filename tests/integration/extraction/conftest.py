"""A workshop for patch extraction: real sandboxes whose agent is a few lines of shell, and plain git to compare with."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from orchestrator.grading.extract import take_patch
from orchestrator.sandbox import repository
from orchestrator.sandbox.base import Role, SandboxSpec
from orchestrator.sandbox.local import LocalProvider
from orchestrator.settings import SandboxSettings, cache_dir
from orchestrator.tasks.record import DatasetKind, RepoSource, Task

if TYPE_CHECKING:
    from orchestrator.sandbox.local_sandbox import LocalSandbox

BASE: dict[str, bytes] = {
    "a.py": b"x = 1\n",
    "dos.txt": b"one\r\ntwo\r\nthree\r\n",
    "run.bat": b"echo one\r\n",
    ".gitattributes": b"*.bat text eol=crlf\n",
    ".gitignore": b"*.log\nbuild/\n!keep.log\n",
    "pkg/b.py": b"y = 1\n",
    "pkg/data.bin": bytes(range(256)),
    "old/gone.py": b"z = 1\n",
    "run.sh": b"#!/bin/sh\n",
}
ENV = {
    "PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/nonexistent", "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_AUTHOR_NAME": "t", "GIT_AUTHOR_EMAIL": "t@t", "GIT_COMMITTER_NAME": "t", "GIT_COMMITTER_EMAIL": "t@t",
}  # fmt: skip


def git(folder: Path, *arguments: str, data: bytes | None = None) -> bytes:
    return subprocess.run(
        ["git", *arguments], cwd=folder, env=ENV, check=True, capture_output=True, input=data
    ).stdout


def fill(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def contents(folder: Path) -> dict[str, tuple[str, bytes]]:
    """Every file and link but `.git`, with what matters to git."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if ".git" in path.relative_to(folder).parts:
            continue
        if path.is_symlink():
            found[name] = ("link", str(path.readlink()).encode())
        elif path.is_file():
            found[name] = ("program" if path.stat().st_mode & 0o100 else "file", path.read_bytes())
    return found


def work(sandbox) -> Path:
    return Path(sandbox.provider_id) / "work"


async def take(sandbox, base: str, limit_bytes: int = 5_000_000, timeout_s: float = 60):
    _, patch = await take_patch(sandbox, base_commit=base, limit_bytes=limit_bytes, timeout_s=timeout_s)
    return patch


class Workshop:
    """A task sandbox whose agent is a few lines of shell, and a clone to try its patch on."""

    base = BASE
    git = staticmethod(git)
    fill = staticmethod(fill)
    contents = staticmethod(contents)
    work = staticmethod(work)
    take = staticmethod(take)

    def __init__(self, folder: Path, provider: LocalProvider) -> None:
        self.folder = folder
        self.provider = provider
        self.count = 0
        self.sandboxes: list[LocalSandbox] = []

    async def open(self, files: dict[str, bytes] = BASE, **changes):
        self.count += 1
        tree = fill(self.folder / f"tree{self.count}", files)
        task = Task(
            instance_id="t", dataset_kind=DatasetKind.LOCAL, workdir="/testbed", problem_statement="x",
            repo_source=changes.pop("repo_source", RepoSource(kind="tree", path=tree)), **changes,
        )  # fmt: skip
        spec = SandboxSpec(key=f"k{self.count}", role=Role.TASK, task=task)
        self.sandboxes.append(await self.provider.create(spec))
        return self.sandboxes[-1]

    async def patch_of(self, commands: str, files: dict[str, bytes] = BASE):
        """Let an agent run the commands; return its sandbox and its patch."""
        sandbox = await self.open(files)
        base = await repository.hide_git(sandbox)
        result = await sandbox.shell(f"set -e\n{commands}", timeout_s=30)
        assert result.exit_code == 0, result.output
        return sandbox, await take(sandbox, base)

    def apply(self, data: bytes, files: dict[str, bytes] = BASE) -> Path:
        """Return a fresh repository with the same base and the patch applied by plain git."""
        self.count += 1
        clone = fill(self.folder / f"clone{self.count}", files)
        git(clone, "init", "-q")
        (clone / ".git/info/attributes").write_text("* -text\n")
        git(clone, "add", "-A", "-f")
        git(clone, "commit", "-qm", "base")
        git(clone, "apply", "--whitespace=nowarn", data=data)
        return clone


@pytest.fixture(scope="module")
def provider(tmp_path_factory):
    folder = tmp_path_factory.mktemp("provider")
    settings = SandboxSettings(root=folder / "sandboxes")
    return LocalProvider(settings, cache_dir=cache_dir())


@pytest.fixture
async def workshop(tmp_path, provider):
    opened = Workshop(tmp_path, provider)
    yield opened
    for sandbox in opened.sandboxes:
        await sandbox.detach()
        await provider.release(sandbox.key)
