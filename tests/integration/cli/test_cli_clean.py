"""`rollouts clean` and AReaL's name for it: what a killed worker left is removed with proof, and nothing else."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from store import soundness
from tests.integration.cli.conftest import ROOT
from tests.integration.cli.test_cli_db import migrated
from tests.integration.cli.test_cli_run import endpoint, kept, slow

if TYPE_CHECKING:
    from tests.integration.cli.conftest import Command

STATUS = "select status, count(*) from sandboxes group by 1 order by 1"


async def killed(command: Command) -> None:
    """Start a run and kill it while its agent waits for the model."""
    async with slow(600.0) as server:
        process = await command.start("run", command.offline, *endpoint(server), *command.own_root)
        await server.wait_for(lambda s: len(s.requests) == 1)
        process.kill()
        await process.communicate()


def change(command: Command, sql: str) -> None:
    """Make rows as only time or another machine would."""
    with closing(sqlite3.connect(command.database)) as connection, connection:
        connection.execute(sql)


def summary(ran: subprocess.CompletedProcess[str]) -> str:
    return ran.stderr.splitlines()[-1]


def dump(command: Command) -> list[str]:
    with closing(sqlite3.connect(command.database)) as connection:
        return list(connection.iterdump())


@pytest.mark.slow
async def test_what_a_killed_worker_left_is_removed_once_and_a_dry_run_removes_nothing(command: Command):
    await killed(command)
    assert command.query(STATUS) == [["live", "1"]]
    before = dump(command)
    planned = command("clean", "--dry-run", "--json")
    assert [json.loads(line)["outcome"] for line in planned.stdout.splitlines()] == ["would remove"]
    assert [
        json.loads(line)["state"] for line in command("resume", "--dry-run", "--json").stdout.splitlines()
    ] == ["agent_running"]
    assert dump(command) == before, "nothing is written, not even who looked"
    cleaned = command("clean")
    assert cleaned.returncode == 0, cleaned.stderr
    assert summary(cleaned).startswith("1 sandboxes removed, 0 belong to live workers, 0 not proven gone")
    assert list(command.boxes.iterdir()) == []
    assert command.query(STATUS) == [["released", "1"]]
    assert command.query("select count(*) from sandbox_leaks") == [["0"]]
    assert command.query("select intents, released + lost + open from sandbox_ledger") == [["1", "1"]]
    again = command("clean")
    assert (again.returncode, again.stdout) == (0, "")
    assert summary(again).startswith("0 sandboxes removed")


@pytest.mark.long
async def test_a_live_workers_sandbox_and_other_stores_stay_and_an_unknown_instance_of_ours_goes(
    command: Command,
):
    async with slow(600.0) as server:
        process = await command.start("run", command.offline, *endpoint(server), *command.own_root)
        await server.wait_for(lambda s: len(s.requests) == 1)
        ((key, store),) = command.query("select key, substr(key, 1, 12) from sandboxes")
        forgotten = f"{store}{'0' * 32}-1-1"
        foreign = f"rw-{'f' * 8}-{'0' * 32}-1-1"
        for name in (forgotten, foreign):
            (command.boxes / name).mkdir()
        cleaned = command("clean", "--json")
        assert cleaned.returncode == 0, cleaned.stderr
        found = {line["key"]: line["outcome"] for line in map(json.loads, cleaned.stdout.splitlines())}
        assert found == {key: "kept", forgotten: "removed"}
        assert sorted(p.name for p in command.boxes.iterdir()) == sorted([key, foreign])
        process.kill()
        await process.communicate()


def test_a_database_that_did_not_exist_proves_nothing(command: Command):
    for words in (("clean",), ("clean", "--dry-run")):
        ran = command(*words)
        assert ran.returncode == 1
        assert "nothing is proven" in ran.stderr
        assert str(command.database) in ran.stderr
    assert not command.database.exists()


def test_a_dry_run_leaves_an_older_schema_as_it_is(command: Command):
    command.database.parent.mkdir(exist_ok=True)
    migrated(command.database, "0001")
    for words in ("clean", "resume"):
        ran = command(words, "--dry-run")
        assert ran.returncode == 1
        assert "rollouts db upgrade" in ran.stderr
    assert soundness.standing(f"sqlite:///{command.database}") == "0001"


@pytest.mark.long
async def test_areals_hook_says_in_lines_what_it_did_and_which_database_it_opened(command: Command):
    await killed(command)
    hook = [sys.executable, "-m", "aweagent.maintenance.clean_instances"]
    command.environ["ROLLOUTS_DATABASE_URL"] = str(command.database)
    ran = await asyncio.to_thread(
        subprocess.run, hook, cwd=command.folder, env={**command.environment(), "PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.splitlines() == [
        f"database: {command.database}",
        "1 unfinished rollouts that nobody has wait for `rollouts resume`",
        "1 sandboxes removed, 0 belong to live workers, 0 not proven gone",
    ]
    none = await asyncio.to_thread(
        subprocess.run, hook, cwd=command.folder, env={**command.environment(), "ROLLOUTS_DATABASE_URL": str(command.folder / "nowhere.db")},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert none.returncode == 1
    assert "nothing is proven" in none.stdout


async def standing_at(process: asyncio.subprocess.Process, file: str) -> None:
    """Wait until a process has opened a file."""
    async with asyncio.timeout(30):
        while file not in opened_by(process.pid):
            await asyncio.sleep(0.02)


def opened_by(pid: int) -> set[str]:
    found = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            found.add(str(descriptor.readlink()))
    return found


@pytest.mark.long
async def test_areals_hook_cleans_for_nobody_who_reads_and_says_when_it_was_interrupted(command: Command):
    await killed(command)
    hook = [sys.executable, "-m", "aweagent.maintenance.clean_instances"]
    command.environ["ROLLOUTS_DATABASE_URL"] = str(command.database)
    environ = {**command.environment(), "PYTHONPATH": str(ROOT)}
    with kept(command.database):
        waiting = await asyncio.create_subprocess_exec(
            *hook, cwd=command.folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        await standing_at(waiting, f"{command.database}.lock")
        waiting.send_signal(signal.SIGINT)
        out, err = await waiting.communicate()
    assert (waiting.returncode, err) == (130, b"")
    assert out == f"database: {command.database}\n".encode() + (
        b"interrupted: what is not removed yet stays written down; run it again\n"
    )
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ran = await asyncio.to_thread(
            subprocess.run,
            hook,
            cwd=command.folder,
            env=environ,
            stdout=writer,
            stderr=subprocess.PIPE,
            check=False,
        )
    finally:
        os.close(writer)
    assert (ran.returncode, ran.stderr) == (0, b"")
    assert command.query(STATUS) == [["released", "1"]]


@pytest.mark.long
async def test_an_authority_that_will_never_answer_is_written_off_with_a_reason_past_its_expiry(
    command: Command,
):
    await killed(command)
    change(command, "update sandboxes set provider_ref = 'local:gone:boot:1-2:/nowhere'")
    for words, status in ((["clean", "--dry-run"], "live"), (["clean"], "releasing")):
        cleaned = command(*words)
        assert cleaned.returncode == 1
        assert "could not be asked" in cleaned.stderr
        assert (words == ["clean"]) is not ("0 sandboxes would be removed" in cleaned.stderr)
        assert command.query(STATUS) == [[status, "1"]]
    write_off = ("clean", "--write-off", "local:gone:boot:1-2:/nowhere")
    assert command(*write_off).returncode == 2
    assert command(*write_off, "--reason", "x", "--dry-run").returncode == 2
    assert command("clean", "--reason", "x").returncode == 2
    unknown = command("clean", "--write-off", "local:other", "--reason", "x")
    assert (unknown.returncode, "no sandbox was made under" in unknown.stderr) == (2, True)
    early = command(*write_off, "--reason", "the machine burned down")
    assert (early.returncode, "stays open, it may live until 20" in early.stderr) == (1, True)
    change(command, "update sandboxes set expires_at = 1")
    late = command(*write_off, "--reason", "the machine burned down")
    assert (late.returncode, late.stderr.splitlines()[-1].split(" of ")[0]) == (0, "1 sandboxes")
    assert late.stderr.endswith("written off, 0 stay open\n")
    ((status, proof),) = command.query("select status, proof from sandboxes")
    assert status == "lost"
    assert proof.startswith("written off by ")
    assert proof.endswith("the machine burned down")
    assert command("clean").returncode == 0
    expected = command("clean", "--all-mine")
    assert (expected.returncode, "could not be asked" in expected.stderr) == (0, False), (
        "nobody expects an answer"
    )
    other = command.folder / "other.db"
    command("db", "upgrade", "--db", str(other))
    several = command(*write_off, "--reason", "x", "--db", str(other), "--db", str(command.database))
    assert several.returncode == 0, several.stderr
