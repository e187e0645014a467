"""The interpreter that tasks run on."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from orchestrator import errors
from orchestrator.sandbox import python_env


async def test_an_interpreter_that_does_not_run_is_a_usage_error(tmp_path):
    for broken in (tmp_path / "none", Path("/bin/false")):
        with pytest.raises(errors.UsageError, match="does not run") as caught:
            await python_env.find(broken, tmp_path)
        assert "sandbox.python" in caught.value.hint


async def test_a_given_interpreter_brings_its_environment_and_its_base(tmp_path):
    found = await python_env.find(Path(sys.executable), tmp_path)
    assert found.bin_dir == Path(sys.executable).parent
    outside_usr = {Path(p) for p in (sys.prefix, sys.base_prefix) if not Path(p).is_relative_to("/usr")}
    assert set(found.folders) == outside_usr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
async def test_sixteen_at_once_make_one_environment_with_pytest_and_little_else(tmp_path):
    try:
        found = await asyncio.gather(*(python_env.find(None, tmp_path) for _ in range(16)))
    except errors.SandboxCreateFailed as failed:
        pytest.skip(f"needs a package index: {failed}")
    executables = {python.executable for python in found}
    assert len(executables) == 1
    listed = await asyncio.create_subprocess_exec(
        str(executables.pop()), "-m", "pip", "list", "--format=freeze", stdout=asyncio.subprocess.PIPE
    )
    output, _ = await listed.communicate()
    names = {line.partition("==")[0].lower() for line in output.decode().split()}
    assert names == {"iniconfig", "packaging", "pip", "pluggy", "pygments", "pytest", "setuptools"}


@pytest.mark.long
async def test_without_a_package_index_the_error_says_what_to_do(tmp_path, monkeypatch):
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_CACHE_DIR", str(tmp_path / "empty"))
    with pytest.raises(errors.SandboxCreateFailed, match="could not be made") as caught:
        await python_env.find(None, tmp_path)
    assert "sandbox.python" in caught.value.hint
    assert not list(tmp_path.glob("pytest-env-*/*.complete"))
