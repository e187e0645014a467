"""`rollouts validate` that is stopped or killed: its sandboxes are in the ledger, and are gone in the end."""

from __future__ import annotations

import asyncio
import shutil
import signal
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.integration.cli.conftest import Command

STATUS = "select status, count(*) from sandboxes group by 1 order by 1"


@pytest.fixture
def slow_task(command: Command) -> Path:
    """The offline task, whose preparation waits until somebody stops it."""
    folder = command.folder / "slow"
    shutil.copytree(command.offline, folder)
    with (folder / "task.yaml").open("a") as file:
        file.write('\npre_commands: "touch began; sleep 600"\n')
    return folder


async def started(command: Command, task: Path) -> asyncio.subprocess.Process:
    """Start a validation and return when its first sandbox runs."""
    process = await command.start(*arguments(command, task))
    while not list(command.boxes.glob("*/work/began")):
        assert process.returncode is None, await process.communicate()
        await asyncio.sleep(0.05)
    return process


def arguments(command: Command, task: Path) -> tuple[str | Path, ...]:
    return ("validate", task, *command.own_root)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
async def test_a_stopped_validation_removes_its_sandbox_with_proof(
    command: Command, slow_task: Path, number: signal.Signals, code: int
):
    process = await started(command, slow_task)
    assert command.query(STATUS) == [["intent", "1"]]
    process.send_signal(number)
    _, said = await process.communicate()
    assert process.returncode == code, said
    assert list(command.boxes.iterdir()) == []
    assert command.query(STATUS) == [["released", "1"]]


@pytest.mark.long
async def test_what_a_killed_validation_leaves_is_removed_by_the_next_but_not_what_a_live_one_has(
    command: Command, slow_task: Path
):
    killed, live = await started(command, slow_task), await command.start(*arguments(command, slow_task))
    while len(list(command.boxes.glob("*/work/began"))) < 2:
        await asyncio.sleep(0.05)
    killed.kill()
    await killed.communicate()
    assert command.query(STATUS) == [["intent", "2"]]
    ran = await asyncio.to_thread(command, *arguments(command, command.offline))
    assert "removed 1 sandboxes" in ran.stderr
    assert command.query(STATUS) == [["intent", "1"], ["released", "3"]]
    assert len(list(command.boxes.iterdir())) == 1
    live.terminate()
    await live.communicate()
    assert command.query(STATUS) == [["released", "4"]]
    assert list(command.boxes.iterdir()) == []
