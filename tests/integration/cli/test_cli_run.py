from __future__ import annotations

import asyncio
import fcntl
import json
import re
import shutil
import signal
import sqlite3
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.testing.loopback import LoopbackServer, Response
from orchestrator.testing.model_server import ScriptedModel
from orchestrator.testing.replay import parse_replay

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.integration.cli.conftest import Command

LIMIT_S = 120
"""For tests that start several processes one after the other: a busy machine takes its time."""
IDLE: list[dict[str, Any]] = [{"tool_calls": [{"name": "submit"}]}]
COUNT = "select state, count(*) from rollouts group by 1 order by 1"


def endpoint(server: ScriptedModel) -> tuple[str, ...]:
    return ("--base-url", server.base_url("any", 0), "--model", "replay")


@contextmanager
def kept(database: Path) -> Iterator[None]:
    """Hold the database's queue ticket, as a process that was stopped would."""
    with database.with_name(f"{database.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def slow(delay_s: float, times: int | None = None) -> ScriptedModel:
    first = {**IDLE[0], "fault": {"delay_s": delay_s, **({"times": times} if times else {})}}
    return ScriptedModel(parse_replay({"*": [{"name": "slow", "turns": [first]}]}))


def test_a_run_of_recorded_turns_ends_with_a_summary_and_three_kinds_of_outcome(
    finished: tuple[Command, subprocess.CompletedProcess[str]],
):
    command, ran = finished
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == ("offline__wordcount-1\t3\t1\t0.3333\t0\tempty_patch 1, resolved 1, unresolved 1\n")
    assert "no model is involved" in ran.stderr
    assert "isolation " in ran.stderr
    assert command.query(COUNT) == [["released", "3"]]
    assert command.query("select count(*) from sandboxes where status <> 'released'") == [["0"]]


def test_a_finished_run_is_answered_from_the_store_without_model_or_sandbox(
    finished: tuple[Command, subprocess.CompletedProcess[str]],
):
    command, ran = finished
    again = command("run", command.offline, "--model", command.replay, "-n", "3", "--run", "first")
    assert again.returncode == 0
    assert again.stdout == ran.stdout
    assert "answering from the store" in again.stderr
    assert "sandboxes:" not in again.stderr
    assert command.query("select max(attempts) from rollouts") == [["1"]]


def test_the_same_run_name_with_other_settings_is_a_conflict(
    finished: tuple[Command, subprocess.CompletedProcess[str]],
):
    command, _ = finished
    other = command(
        "run", command.offline, "--model", command.replay, "--run", "first", "--set", "agent.step_limit=7"
    )
    assert other.returncode == 2
    assert "another request" in other.stderr
    assert "new run name" in other.stderr


@pytest.mark.long
@pytest.mark.timeout(LIMIT_S)
def test_without_a_name_a_finished_run_is_followed_by_the_next(command: Command):
    arguments = ("run", command.offline, "--model", command.replay)
    first, second = command(*arguments), command(*arguments)
    assert (first.returncode, second.returncode) == (0, 0)
    names = [name for (name,) in command.query("select distinct run_id from rollouts order by created_at")]
    assert len(names) == 2
    assert names[1] == f"{names[0]}.2"
    assert f"starting {names[1]}" in second.stderr


BAD = {
    "missing file": (["{tmp}/none.jsonl", "--model", "{replay}"], r"none\.jsonl does not exist"),
    "broken JSON line": (["{tmp}/broken.jsonl", "--model", "{replay}"], r"broken\.jsonl:1"),
    "unknown setting": (
        ["{offline}", "--model", "{replay}", "--set", "agent.step_limt=3"],
        r"step_limt.*did you mean 'step_limit'",
    ),
    "no section": (["{offline}", "--model", "{replay}", "--set", "step_limit=3"], "is not section.key=value"),
    "unknown configuration": (["{offline}", "--model", "{replay}", "--config", "trane"], "did you mean 'train'"),
    "unknown agent": (["{offline}", "--model", "{replay}", "--agent", "sew"], "choose one of: swe"),
    "unknown sandbox": (["{offline}", "--model", "{replay}", "--sandbox", "mars"], "choose one of: local"),
    "no endpoint": (["{offline}", "--model", "m"], "give --base-url"),
    "no model": (["{offline}", "--base-url", "http://127.0.0.1:9/v1"], "give --model"),
    "nobody listens": (
        ["{offline}", "--base-url", "http://127.0.0.1:9/v1", "--model", "m"],
        "cannot be reached",
    ),
    "not an address": (["{offline}", "--base-url", "127.0.0.1:9", "--model", "m"], "not the address"),
    "port out of range": (["{offline}", "--base-url", "http://127.0.0.1:99999/v1", "--model", "m"], "port cannot be read"),
    "password in the address": (
        ["{offline}", "--base-url", "http://user:s3cr3t@127.0.0.1:9/v1", "--model", "m"],
        r"user name or password(?!.*s3cr3t)",
    ),
    "missing replay": (["{offline}", "--model", "replay:none.yaml"], "none.yaml cannot be read"),
    "replay of other tasks": (
        ["{offline}", "--model", "replay:{tmp}/other.yaml"],
        "has no turns for offline__wordcount-1",
    ),
    "not a database": (["{offline}", "--model", "{replay}", "--db", "{tmp}/other.yaml"], "not a SQLite database"),
    "no samples": (["{offline}", "--model", "{replay}", "-n", "0"], "-n"),
    "no tasks": ([], "TASKS"),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_refused_with_exit_code_2_and_nothing_is_submitted(
    command: Command, write_record: Callable[[str, str], Path], arguments: list[str], message: str
):
    write_record("broken.jsonl", '{"instance_id": "x__y-1", \n')
    write_record("other.yaml", "somebody__else-1: [{name: a, turns: []}]\n")
    names = {
        "tmp": command.folder, "replay": command.replay, "offline": command.offline,
    }  # fmt: skip
    ran = command("run", *(a.format(**names) for a in arguments))
    assert ran.returncode == 2, ran.stderr
    assert re.search(message, ran.stderr.replace("\n", " ")), ran.stderr
    assert "Traceback" not in ran.stderr
    assert ran.stdout == ""
    if command.database.exists():
        assert command.query("select count(*) from rollouts") == [["0"]]


async def test_an_endpoint_that_refuses_the_key_is_found_before_anything_is_submitted(command: Command):
    async def refuse(_request: object) -> Response:
        return Response(status=401, body=b"{}")

    server = LoopbackServer(refuse)
    await server.open()
    url = f"http://127.0.0.1:{server.port}/v1"
    try:
        ran = await asyncio.to_thread(
            command, "run", command.offline, "--base-url", url, "--model", "m", "--api-key-env", "MY_KEY"
        )
    finally:
        await server.close()
    assert ran.returncode == 2
    assert "refuses the key in MY_KEY (status 401)" in ran.stderr


async def test_refused_records_do_not_stop_the_others_but_make_the_exit_code_1(
    command: Command, write_record: Callable[[str, str], Path]
):
    folder = command.folder / "tasks"
    folder.mkdir()
    (folder / "good").symlink_to(command.offline)
    (folder / "bad").mkdir()
    (folder / "bad" / "task.yaml").write_text("instance_id: bad__bad-1\nworkdir: /testbed\n")
    ran = await asyncio.to_thread(command, "run", folder, "--model", command.replay)
    assert ran.returncode == 1, ran.stderr
    assert "refused: " in ran.stderr
    assert "bad__bad-1" in ran.stderr
    assert ran.stdout.split("\t")[:3] == ["offline__wordcount-1", "1", "1"]


async def test_a_rollout_without_a_reward_makes_the_exit_code_1(command: Command):
    script = parse_replay({"*": [{"name": "broken", "turns": [{"fault": {"status": 400, "body": "{}"}}]}]})
    async with ScriptedModel(script) as server:
        ran = await asyncio.to_thread(
            command,
            "run",
            command.offline,
            *endpoint(server),
            "--set",
            "llm.connect_retries=0",
            "--set",
            "retry.backoff_base_s=0",
            "-n",
            "3",
            "--retries",
            "0",
        )
    assert ran.returncode == 1, ran.stderr
    assert "3 without a reward" in ran.stderr
    assert "failed:" in ran.stdout
    told = [line for line in ran.stderr.splitlines() if line.startswith("rollout ")]
    assert len(told) == 1, ran.stderr
    ((first, message),) = command.query(
        "select id, failure_msg from rollouts order by created_at, id limit 1"
    )
    assert told[0] == f"rollout {first} (offline__wordcount-1): no_llm_call: {message} (and 2 more)"
    assert f"hint: rollouts show {first}" in ran.stderr
    assert f"warning: rollout {first} (offline__wordcount-1) failed: no_llm_call: " in ran.stderr
    listed = await asyncio.to_thread(command, "list")
    assert [line.split("\t")[-1] for line in listed.stdout.splitlines()] == [message] * 3
    assert [json.loads(line)["failure_msg"] for line in command("list", "--json").stdout.splitlines()] == [
        message
    ] * 3


@pytest.mark.long
@pytest.mark.timeout(LIMIT_S)
def test_a_finished_run_of_two_records_with_one_id_is_answered_from_the_store(command: Command):
    folder = command.folder / "tasks"
    for name in ("one", "two"):
        shutil.copytree(command.offline, folder / name)
    task = folder / "two" / "task.yaml"
    task.write_text(task.read_text().replace("timeout_s: 60", "timeout_s: 333"))
    arguments = ("run", folder, "--model", command.replay, "--run", "twins")
    first, again = command(*arguments), command(*arguments)
    assert "answering from the store" in again.stderr, first.stderr + again.stderr
    assert "sandboxes:" not in again.stderr
    assert again.stdout == first.stdout
    assert again.stdout.split("\t")[1] == "2"


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
async def test_the_first_interrupt_lets_running_rollouts_finish_and_the_same_command_continues(
    command: Command,
):
    async with slow(1.0) as server:
        arguments: tuple[str | Path, ...] = ("run", command.offline, *endpoint(server), "-n", "3", "-j", "1")
        process = await command.start(*arguments)
        await server.wait_for(lambda s: len(s.requests) == 1)
        process.send_signal(signal.SIGINT)
        _, said = await process.communicate()
        assert process.returncode == 130, said
        assert b"draining 1 " in said
        assert await asyncio.to_thread(command.query, COUNT) == [["created", "2"], ["released", "1"]]
        again = await asyncio.to_thread(command, *arguments)
    assert again.returncode == 0, again.stderr
    assert "2 of 3 rollouts are unfinished" in again.stderr
    assert command.query(COUNT) == [["released", "3"]]
    assert command.query("select count(distinct run_id), max(attempts) from rollouts") == [["1", "1"]]


@pytest.mark.parametrize(
    "second", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)], ids=["SIGINT", "SIGTERM"]
)
async def test_the_second_interrupt_stops_at_once_and_gives_the_attempt_back(
    command: Command, second: signal.Signals
):
    async with slow(600.0, times=1) as server:
        arguments: tuple[str | Path, ...] = ("run", command.offline, *endpoint(server))
        process = await command.start(*arguments)
        assert process.stderr is not None
        await server.wait_for(lambda s: len(s.requests) == 1)
        process.send_signal(signal.SIGINT)
        await process.stderr.readuntil(b"draining 1 ")
        process.send_signal(second)
        _, said = await process.communicate()
        assert process.returncode == 130, said
        held = "select count(*) from rollouts where lease_owner is not null"
        assert await asyncio.to_thread(command.query, held) == [["0"]]
        left = "select count(*) from sandboxes where status <> 'released'"
        assert await asyncio.to_thread(command.query, left) == [["0"]]
        again = await asyncio.to_thread(command, *arguments)
    assert again.returncode == 0, again.stderr
    assert command.query("select state, attempts from rollouts") == [["released", "2"]]
    assert command.query("select outcome from attempts order by fence") == [["interrupted"], ["done"]]


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
async def test_an_interrupt_ends_a_command_that_waits_for_a_database_somebody_keeps(command: Command):
    command.database.parent.mkdir()
    with kept(command.database):
        process = await command.start("run", command.offline, "--model", command.replay)
        assert process.stderr is not None
        await process.stderr.readuntil(b"waiting for another process that holds")
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(10):
            await process.communicate()
    assert process.returncode == 130


@pytest.mark.long
@pytest.mark.timeout(LIMIT_S)
async def test_two_interrupts_end_a_run_whose_database_somebody_keeps(command: Command):
    async with slow(600.0, times=1) as server:
        process = await command.start(
            "run", command.offline, *endpoint(server), "-n", "2", "-j", "2", *command.own_root
        )
        assert process.stderr is not None
        await server.wait_for(lambda s: len(s.requests) >= 1)
        with kept(command.database):
            process.send_signal(signal.SIGINT)
            await process.stderr.readuntil(b"draining ")
            process.send_signal(signal.SIGINT)
            async with asyncio.timeout(60):
                await process.communicate()
    assert process.returncode != 0


@pytest.mark.long
@pytest.mark.timeout(LIMIT_S)
async def test_two_processes_started_at_the_same_moment_share_the_run(command: Command):
    async with slow(0.2) as server:
        arguments: tuple[str | Path, ...] = ("run", command.offline, *endpoint(server), "-n", "2", "-j", "1")
        both = [await command.start(*arguments) for _ in range(2)]
        said = [await process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert command.query("select count(*), count(distinct run_id) from rollouts") == [["2", "1"]]
    assert command.query("select count(*), max(fence) from attempts") == [["2", "1"]]
    assert command.query(COUNT) == [["released", "2"]]


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize("is_visible", [True, False], ids=["on this machine", "out of sight"])
async def test_a_killed_process_is_taken_over_at_once_or_within_a_second_of_its_lease(
    command: Command, is_visible: bool
):
    async with slow(600.0, times=1) as server:
        arguments: tuple[str | Path, ...] = ("run", command.offline, *endpoint(server))
        process = await command.start(*arguments)
        await server.wait_for(lambda s: len(s.requests) == 1)
        process.kill()
        await process.communicate()
        ((lease_until,),) = command.query("select lease_until from rollouts")
        if not is_visible:
            with closing(sqlite3.connect(command.database)) as connection, connection:
                connection.execute("update workers set pid_ns = 'another'")
        again = await asyncio.to_thread(command, *arguments, timeout_s=180)
    assert again.returncode == 0, again.stderr
    assert ("waiting for 1 rollout held by worker" in again.stderr) is not is_visible
    ((claimed_at,),) = command.query("select max(claimed_at) from attempts")
    waited_ms = int(claimed_at) - int(lease_until)
    assert waited_ms < 0 if is_visible else 0 <= waited_ms <= 1000
    assert command.query("select state, crash_count from rollouts") == [["released", "1"]]
    assert command.query("select count(*) from sandboxes where status <> 'released'") == [["0"]]
