"""Every kind of local isolation passes the suite that every sandbox backend has to pass."""

from __future__ import annotations

import asyncio
import itertools
import sys
from pathlib import Path

import pytest

from orchestrator.errors import IsolationRefused
from orchestrator.sandbox.base import Role, SandboxSpec
from orchestrator.sandbox.local import LocalProvider
from orchestrator.settings import SandboxSettings
from orchestrator.tasks.record import DatasetKind, RepoSource, Task
from orchestrator.testing.sandbox_conformance import CHECKS


@pytest.fixture
def new_spec(tmp_path):
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "module.py").write_text("answer = 41\n")
    (tree / ".gitignore").write_text("*.log\n")
    (tree / "tracked.log").write_text("ignored, yet part of the base\n")
    task = Task(
        instance_id="demo__demo-1",
        dataset_kind=DatasetKind.LOCAL,
        workdir="/testbed",
        problem_statement="The answer is wrong.",
        repo_source=RepoSource(kind="tree", path=tree),
    )
    numbers = itertools.count()
    return lambda: SandboxSpec(
        key=f"conform-{tmp_path.name[-20:].strip('-_').replace('_', '-')}-{next(numbers)}",
        role=Role.TASK,
        task=task,
    )


@pytest.fixture(scope="module", params=["bwrap", pytest.param("unshare", marks=pytest.mark.long), "none"])
def prepared(request, tmp_path_factory):
    """One provider an isolation: probing the machine again for every check would only cost time."""
    folder = tmp_path_factory.mktemp(request.param)
    settings = SandboxSettings(
        root=folder / "sandboxes",
        python=Path(sys.executable),
        isolation=request.param,
        allow_no_isolation=request.param == "none",
    )
    made = LocalProvider(settings, cache_dir=folder / "cache")
    try:
        asyncio.run(made.preflight())
    except IsolationRefused as refused:
        pytest.skip(f"this machine offers no {request.param}: {refused}")
    return made


@pytest.fixture
async def provider(prepared):
    yield prepared
    await prepared.close()
    assert await prepared.list_ours("") == []


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
async def test_the_local_backend_keeps_its_promises(check, provider, new_spec):
    await check(provider, new_spec)
