"""A provider over a network passes the suite of every backend; its sandboxes outlive clients; its faults are bounded."""

from __future__ import annotations

import asyncio
import itertools
import json
import uuid

import pytest

from orchestrator import errors
from orchestrator.sandbox.base import Instance, Role, SandboxSpec
from orchestrator.tasks.record import DatasetKind, RepoSource, Task
from orchestrator.testing.box_faults import Fault, Faults, When
from orchestrator.testing.box_service import ORACLE
from orchestrator.testing.remote_boxes import RemoteProvider, box_service
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
    name = uuid.uuid4().hex[:12]
    return lambda: SandboxSpec(key=f"remote-{name}-{next(numbers)}", role=Role.TASK, task=task)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("service")


@pytest.fixture(scope="module")
def address(folder):
    with box_service(folder) as address:
        yield address


@pytest.fixture
async def provider(address):
    made = RemoteProvider(address)
    yield made
    assert await made.list_ours("") == []
    await made.close()


@pytest.mark.long
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
async def test_the_remote_backend_keeps_its_promises(check, provider, new_spec):
    await check(provider, new_spec)


async def test_a_shell_outlives_the_client_that_used_it(provider, address, new_spec):
    spec = new_spec()
    box = await provider.create(spec)
    await box.shell("cd /; export SEEN=1", timeout_s=30)
    other = RemoteProvider(address)
    again = await other.attach(spec, box.provider_id)
    assert (await again.shell("echo $PWD $SEEN", timeout_s=30)).output == b"/ 1\n"
    await other.release(spec.key)
    await other.close()
    with pytest.raises(errors.SandboxLost):
        await box.shell("true", timeout_s=30)


async def test_the_oracle_has_a_line_for_every_call_in_the_order_of_arrival(provider, folder, new_spec):
    spec = new_spec()
    box = await provider.create(spec)
    await box.run(["true"], timeout_s=30)
    await provider.attach(spec, box.provider_id)
    await provider.release(spec.key)
    with pytest.raises(errors.SandboxLost):
        await box.run(["true"], timeout_s=30)
    lines = [json.loads(line) for line in (folder / ORACLE).read_text().splitlines()]
    mine = [line for line in lines if line["key"] == spec.key]
    assert [(line["op"], line["ok"]) for line in mine] == [
        ("create", True),
        ("exec", True),
        ("attach", True),
        ("delete", True),
        ("exec", False),
    ]
    assert [line["n"] for line in mine] == sorted(line["n"] for line in mine)


async def test_a_service_that_does_not_answer_proves_nothing(tmp_path, new_spec):
    with box_service(tmp_path / "gone") as address:
        provider = RemoteProvider(address)
        box = await provider.create(spec := new_spec())
    with pytest.raises(errors.SandboxLost):
        await provider.list_ours("")
    with pytest.raises(errors.SandboxLost):
        await provider.release(spec.key)
    with pytest.raises(errors.SandboxCreateFailed):
        await provider.create(new_spec())
    assert not await box.alive()
    await provider.close()


async def test_a_service_with_faults_leaves_nothing_behind_when_every_release_is_proven(tmp_path, new_spec):
    made = failed = 0
    with box_service(tmp_path / "faulty", "--fault-rate", "0.5", "--seed", "3") as address:
        provider = RemoteProvider(address)
        for _ in range(6):
            spec = new_spec()
            try:
                await provider.create(spec)
                made += 1
            except errors.SandboxCreateFailed:
                failed += 1
            failed += await _release(provider, spec.key)
        assert made
        assert failed
        assert await _list(provider) == []
        await provider.close()


async def test_a_create_that_was_cut_off_may_take_effect_later(tmp_path, new_spec):
    spec = new_spec()
    seed = next(
        seed
        for seed in itertools.count()
        if Faults(seed, rate=1.0, slow_ms=0).choose("create", spec.key).when is When.LATER
    )
    with box_service(tmp_path / "late", "--fault-rate", "1", "--seed", str(seed)) as address:
        provider = RemoteProvider(address)
        with pytest.raises(errors.SandboxCreateFailed):
            await provider.create(spec)
        assert await _list(provider) == []
        while not await _list(provider):
            await asyncio.sleep(0.05)  # the service's own delay
        assert await _release(provider, spec.key)
        assert await _list(provider) == []
        await provider.close()


async def _release(provider: RemoteProvider, key: str) -> int:
    """Release until that is proven; return how often it was not."""
    for failed in range(4):
        try:
            await provider.release(key)
        except errors.SandboxLost:
            continue
        return failed
    pytest.fail("the faults of one key do not end")


async def _list(provider: RemoteProvider) -> list[Instance]:
    try:
        return await provider.list_ours("")
    except errors.SandboxLost:
        return await provider.list_ours("")


def test_faults_come_from_the_seed_and_end():
    def drawn(seed: int) -> list[Fault]:
        faults = Faults(seed, rate=1.0, slow_ms=10, most_per_owner=2)
        calls = [("create", "o-1-1"), ("exec", "o-1-1"), ("exec", "o-1-2"), ("delete", "o-1-1")]
        return [faults.choose(*call) for call in calls * 3]

    first = drawn(1)
    assert first == drawn(1) != drawn(2)
    assert sum(fault.status is not None for fault in first) == 3
    assert {fault.when for fault in first} <= set(When)
    assert any(fault.before_s > 0 for fault in first)
