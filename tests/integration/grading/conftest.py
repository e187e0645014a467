"""A bench for grading: one small broken repository, patches made for it with plain git, fresh sandboxes."""

from __future__ import annotations

import subprocess
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from orchestrator.grading import pipeline
from orchestrator.sandbox.base import Role, SandboxSpec
from orchestrator.sandbox.local import LocalProvider
from orchestrator.settings import SandboxSettings, cache_dir
from orchestrator.tasks.record import DatasetKind, RepoSource, Task

if TYPE_CHECKING:
    from orchestrator.grading.base import Grade
    from orchestrator.sandbox.local_sandbox import LocalSandbox

BASE: dict[str, bytes] = {
    "calc.py": b"def add(a, b):\n    return a - b\n\n\ndef same(a):\n    return a\n",
    "tests/test_calc.py": b"import calc\n\n\ndef test_same():\n    assert calc.same(1) == 1\n",
    "setup.cfg": b"[metadata]\nname = calc\n\n[tool:pytest]\naddopts = -q -p no:hypothesispytest -p no:asyncio -p no:anyio -p no:timeout\n",
    ".gitignore": b"*.log\n",
}
FIX = {"calc.py": BASE["calc.py"].replace(b"a - b", b"a + b")}
HIDDEN = {
    "tests/test_calc.py": BASE["tests/test_calc.py"]
    + b"\n\ndef test_add():\n    assert calc.add(2, 2) == 4\n",
    "tests/test_new.py": b"import calc\n\n\ndef test_zero():\n    assert calc.add(0, 0) == 0\n",
}
F2P = ("tests/test_calc.py::test_add",)
P2P = ("tests/test_calc.py::test_same", "tests/test_new.py::test_zero")
ENV = {
    "PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/nonexistent", "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_AUTHOR_NAME": "t", "GIT_AUTHOR_EMAIL": "t@t", "GIT_COMMITTER_NAME": "t", "GIT_COMMITTER_EMAIL": "t@t",
}  # fmt: skip


def git(folder: Path, *arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=folder, env=ENV, check=True, capture_output=True).stdout


def fill(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


class Bench:
    """A task, patches made for it with plain git, and fresh sandboxes to grade them in."""

    base = BASE
    fix = FIX
    hidden = HIDDEN
    git = staticmethod(git)

    def __init__(self, folder: Path, provider: LocalProvider) -> None:
        self.folder = folder
        self.provider = provider
        self.sandboxes: list[LocalSandbox] = []
        self.count = 0
        tree = fill(folder / "tree", self.base)
        self.task = Task(
            instance_id="calc__calc-1",
            dataset_kind=DatasetKind.LOCAL,
            workdir="/testbed",
            problem_statement="2 + 2 is not 0",
            repo_source=RepoSource(kind="tree", path=tree),
            strict=True,
            targets=("tests",),
            test_patch=self.diff(HIDDEN),
            gold_patch=self.diff(FIX),
            fail_to_pass=F2P,
            pass_to_pass=P2P,
        )

    def rebase(self, files: dict[str, bytes]) -> None:
        """Let the task, and every patch from now on, start from other files."""
        self.base = files
        self.count += 1
        tree = fill(self.folder / f"tree{self.count}", files)
        self.task = self.task.model_copy(
            update={"repo_source": RepoSource(kind="tree", path=tree), "gold_patch": None}
        )

    def diff(self, files: dict[str, bytes], *, remove: tuple[str, ...] = ()) -> bytes:
        self.count += 1
        clone = fill(self.folder / f"clone{self.count}", self.base)
        git(clone, "init", "-q")
        git(clone, "add", "-A", "-f")
        git(clone, "commit", "-qm", "base")
        for name in remove:
            (clone / name).unlink()
            if not any(clone.joinpath(name).parent.iterdir()):
                clone.joinpath(name).parent.rmdir()
        fill(clone, files)
        git(clone, "add", "-A", "-f")
        return git(clone, "diff", "--cached", "--binary", "--full-index", "--no-renames", "HEAD")

    async def sandbox(self, task: Task) -> LocalSandbox:
        spec = SandboxSpec(key=f"g-{uuid.uuid4().hex}", role=Role.GRADING, task=task)
        self.sandboxes.append(await self.provider.create(spec))
        return self.sandboxes[-1]

    async def grade(
        self, patch: bytes, *, timeout_s: float = 30, log_limit: int = 1_000_000, **changes
    ) -> Grade:
        task = self.task.model_copy(update=changes)
        sandbox = await self.sandbox(task)
        return await pipeline.grade(task, patch, sandbox, timeout_s=timeout_s, log_limit=log_limit)

    def tree(self) -> Path:
        """The work tree of the last sandbox."""
        return Path(self.sandboxes[-1].provider_id) / "work"


@pytest.fixture(scope="module")
def provider(tmp_path_factory):
    folder = tmp_path_factory.mktemp("provider")
    settings = SandboxSettings(root=folder / "sandboxes")
    return LocalProvider(settings, cache_dir=cache_dir())


@pytest.fixture
async def bench(tmp_path, provider):
    opened = Bench(tmp_path, provider)
    yield opened
    for sandbox in opened.sandboxes:
        await sandbox.detach()
        await provider.release(sandbox.key)
