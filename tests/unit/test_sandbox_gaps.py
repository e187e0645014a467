"""A cap that the kernel does not apply is said, never silently absent."""

from __future__ import annotations

import logging
import os
import sys
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
