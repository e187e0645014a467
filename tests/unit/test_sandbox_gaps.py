"""A cap that the kernel does not apply is said, never silently absent."""

from __future__ import annotations

import logging
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from orchestrator.sandbox import cgroups
from orchestrator.sandbox.local import LocalProvider
from orchestrator.settings import SandboxSettings


def hierarchy(*controllers: str) -> cgroups.Hierarchy:
    return cgroups.Hierarchy(parent=Path("/nowhere"), controllers=frozenset(controllers), version=2)


@pytest.mark.parametrize(
    ("hierarchies", "user_id", "says"),
    [
        ((), 0, True),
        ((hierarchy("memory"),), 0, True),
        ((hierarchy("memory"), hierarchy("pids")), 0, False),
        ((), 1000, False),
    ],
)
def test_only_root_without_a_pids_cgroup_has_no_cap_on_processes(hierarchies, user_id, says):
    assert any("not capped" in gap for gap in cgroups.gaps(hierarchies, user_id=user_id)) == says


@pytest.mark.parametrize("processes", [512, None])
async def test_a_missing_cap_is_warned_of_once_and_only_where_one_was_asked_for(tmp_path, caplog, processes):
    settings = SandboxSettings(
        root=tmp_path / "boxes", python=Path(sys.executable), isolation="none", allow_no_isolation=True,
        processes=processes,
    )  # fmt: skip
    provider = LocalProvider(settings, cache_dir=tmp_path / "cache")
    with caplog.at_level(logging.WARNING):
        await provider.preflight()
        await provider.preflight()
    absent = cgroups.gaps(cgroups.find_hierarchies(), user_id=os.geteuid())
    expected = absent if processes is not None else ()
    assert provider.gaps == expected
    assert [r.getMessage() for r in caplog.records] == [
        f"sandboxes on this machine: {gap}" for gap in expected
    ]


def test_many_threads_may_look_for_hierarchies_at_once_and_find_the_same(tmp_path):
    controllers = tmp_path / "cgroup" / "pids"
    controllers.mkdir(parents=True)
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "cgroup").write_text("4:pids:/\n")
    (proc / "mountinfo").write_text(f"1 1 0:1 / {controllers} rw - cgroup cgroup rw,pids\n")

    def look(_number: int) -> tuple[cgroups.Hierarchy, ...]:
        return cgroups.find_hierarchies(proc)

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(look, range(400)))  # a folder that one makes and another removes raises here
    assert set(found) == {()}, "a plain folder has no files of a controller"
    assert list(controllers.iterdir()) == []
