"""A sandbox is proven gone where it was made, whatever folder the worker that releases it would use itself."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator import errors
from orchestrator.sandbox.base import Role, SandboxSpec
from orchestrator.sandbox.local import LocalProvider
from orchestrator.settings import SandboxSettings
from orchestrator.states import State
from orchestrator.tasks.record import DatasetKind, RepoSource, Task
from orchestrator.testing.faults import failing

if TYPE_CHECKING:
    from tests.integration.conftest import Machine

NAP_S = 100_000 + os.getpid()
"""Tells the processes of these tests from those of others."""


@pytest.fixture
def spec(tmp_path):
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "module.py").write_text("answer = 41\n")
    task = Task(
        instance_id="demo__demo-1",
        dataset_kind=DatasetKind.LOCAL,
        workdir="/testbed",
        problem_statement="x",
        repo_source=RepoSource(kind="tree", path=tree),
    )
    return SandboxSpec(key=f"release-{os.getpid()}", role=Role.TASK, task=task)


def provider_at(root: Path, **settings: Any) -> LocalProvider:
    chosen = SandboxSettings(
        root=root, python=Path(sys.executable), isolation="none", allow_no_isolation=True, **settings
    )
    return LocalProvider(chosen, cache_dir=root.parent / "cache")


@pytest.fixture
async def left(tmp_path, spec):
    """A sandbox that its worker has forgotten, and the authority its ledger row names."""
    maker = provider_at(tmp_path / "one")
    ref = maker.ref
    sandbox = await maker.create(spec)
    await sandbox.shell(
        f"sleep {NAP_S} & until grep -qsx sleep /proc/$!/comm; do :; done; disown", timeout_s=20
    )
    yield ref
    await maker.release(spec.key, ref if (tmp_path / "one").exists() else None)


def sleepers() -> list[str]:
    return [p.name for p in Path("/proc").iterdir() if p.name.isdigit() and _is_sleeper(p)]


def _is_sleeper(proc: Path) -> bool:
    try:
        return (proc / "cmdline").read_bytes() == f"sleep\0{NAP_S}\0".encode()
    except OSError:
        return False


async def test_a_worker_with_another_root_releases_where_the_sandbox_was_made(tmp_path, spec, left):
    other = provider_at(tmp_path / "two")
    assert other.ref != left
    assert [i.key for i in await other.list_ours("", left)] == [spec.key]
    assert sleepers()
    proof = await other.release(spec.key, left)
    assert str(tmp_path / "one" / spec.key) in proof
    assert left in proof
    assert not (tmp_path / "one" / spec.key).exists()
    assert sleepers() == []
    assert await other.list_ours("", left) == []


def replaced(ref: str, **parts: str) -> str:
    names = ("kind", "host", "boot", "identity", "root")
    return ":".join(parts.get(name, old) for name, old in zip(names, ref.split(":", 4), strict=True))


ELSEWHERE: tuple[dict[str, str], ...] = (
    {"kind": "remote"},
    {"host": "another-machine"},
    {"identity": "1-1"},
    {"root": "/nowhere/areal-sweagent"},
    {"root": "relative"},
    {"host": "another-machine", "boot": "another-boot"},
)


async def test_an_authority_that_cannot_be_asked_proves_nothing(tmp_path, spec, left):
    for parts in ELSEWHERE:
        for provider in (provider_at(tmp_path / "one"), provider_at(tmp_path / "two")):
            with pytest.raises(errors.SandboxLost, match="cannot be asked"):
                await provider.release(spec.key, replaced(left, **parts))
            with pytest.raises(errors.SandboxLost, match="cannot be asked"):
                await provider.list_ours("", replaced(left, **parts))
    assert (tmp_path / "one" / spec.key).exists()
    assert sleepers()


async def test_a_name_without_a_folder_is_no_authority(tmp_path, spec, left):
    with pytest.raises(errors.SandboxLost, match="cannot be asked"):
        await provider_at(tmp_path / "one").release(spec.key, left.rsplit(":", 2)[0])


async def test_another_folder_at_the_same_path_proves_nothing(tmp_path, spec, left):
    (tmp_path / "one").rename(tmp_path / "moved")
    again = provider_at(tmp_path / "one")
    assert again.ref != left
    with pytest.raises(errors.SandboxLost, match="is another folder here"):
        await again.release(spec.key, left)
    (tmp_path / "one").rmdir()
    with pytest.raises(errors.SandboxLost, match="is not visible here"):
        await again.release(spec.key, left)
    (tmp_path / "one").symlink_to(tmp_path / "moved")
    with pytest.raises(errors.SandboxLost, match="is another folder here"):
        await again.release(spec.key, left)
    (tmp_path / "one").unlink()
    (tmp_path / "moved").rename(tmp_path / "one")
    assert await again.release(spec.key, left)


async def test_after_a_reboot_the_folder_that_is_left_is_removed(tmp_path, spec, left):
    proof = await provider_at(tmp_path / "two").release(spec.key, replaced(left, boot="before"))
    assert "started again" in proof
    assert not (tmp_path / "one" / spec.key).exists()


async def test_after_a_reboot_a_root_that_is_gone_is_said_to_be_gone(tmp_path, spec):
    maker = provider_at(tmp_path / "one")
    ref = replaced(maker.ref, boot="before")
    (tmp_path / "one").rmdir()
    proof = await provider_at(tmp_path / "two").release(spec.key, ref)
    assert f"{tmp_path / 'one'} went with the old start" in proof
    assert await provider_at(tmp_path / "two").list_ours("", ref) == []


async def test_a_folder_that_cannot_be_deleted_is_not_proven_gone(tmp_path, spec):
    provider = provider_at(tmp_path / "one")
    ref = provider.ref
    busy = tmp_path / "one" / spec.key
    busy.mkdir()
    provider_path = os.environ["PATH"]
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "rm").write_text("#!/bin/sh\necho stuck >&2\nexit 1\n")
    (tools / "rm").chmod(0o755)
    os.environ["PATH"] = f"{tools}:{provider_path}"
    try:
        with pytest.raises(errors.SandboxLost, match="is still there: stuck"):
            await provider.release(spec.key, ref)
    finally:
        os.environ["PATH"] = provider_path
    assert await provider.release(spec.key, ref)


async def test_what_a_killed_preflight_left_is_swept_when_it_is_old(tmp_path):
    root = tmp_path / "one"
    old, young = root / ".preflight-abcd", root / ".preflight-efgh"
    for folder in (old, young):
        (folder / "work").mkdir(parents=True)
    os.utime(old, (1, 1))
    await provider_at(root).preflight()
    assert [p.name for p in root.iterdir()] == [young.name]


@pytest.mark.slow
async def test_a_rollout_taken_over_by_a_worker_with_another_root_leaves_nothing_in_the_first(
    machine: Machine, tmp_path
):
    sleeping, submit = ({"tool_calls": [call]} for call in (_bash("sleep 60"), {"name": "submit"}))
    rollout_id = await machine.submit()
    machine.provider.fault = failing("release")
    running = asyncio.create_task(machine.serve(rollout_id, sleeping, submit))
    async with asyncio.timeout(30):
        while State.AGENT_RUNNING not in machine.moves:
            await asyncio.wait({running}, timeout=0.02)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    (box,) = await machine.provider.list_ours("")

    machine.provider.fault = lambda _call, _number: None
    machine.provider.inner = provider_at(tmp_path / "two")
    ending = await machine.serve(rollout_id, {"tool_calls": [_bash("echo 1 > new")]}, submit)
    assert ending.state is State.RELEASED
    assert list((tmp_path / "boxes").iterdir()) == []
    await machine.check_nothing_is_left()
    proofs = {row["key"]: row["proof"] for row in await machine.rows("sandboxes", rollout_id)}
    assert str(tmp_path / "boxes" / box.key) in proofs[box.key]


def _bash(command: str) -> dict[str, Any]:
    return {"name": "bash", "arguments": {"command": command}}
