"""A run that is called again runs what is missing, and failed samples are missing."""

from __future__ import annotations

import asyncio
import shutil
import signal
from typing import TYPE_CHECKING, Any, Self

import httpx
import pytest

from orchestrator.testing.loopback import LoopbackServer, Request, Response
from orchestrator.testing.model_server import ScriptedModel
from orchestrator.testing.replay import parse_replay

if TYPE_CHECKING:
    from pathlib import Path

    from tests.integration.cli.conftest import Command

LIMIT_S = 120
"""For tests that start several processes one after the other: a busy machine takes its time."""
ALL = "select id, sample, retry_no, parent_id, state, attempts from rollouts order by retry_no, sample"


def model(*, failures: int | None = 0) -> ScriptedModel:
    """Hand in at once; the first so many requests (None: all) end their rollouts without a new attempt."""
    turn: dict[str, Any] = {"tool_calls": [{"name": "submit"}]}
    if failures != 0:
        turn["fault"] = {"status": 400, "body": "{}", **({"times": failures} if failures else {})}
    return ScriptedModel(parse_replay({"*": [{"name": "short", "turns": [turn]}]}))


def endpoint(server: ScriptedModel) -> tuple[str, ...]:
    return ("--base-url", server.base_url("any", 0), "--model", "replay")


class Gate:
    """A way to the model on which no question gets through until it is opened."""

    def __init__(self, server: ScriptedModel) -> None:
        self.asked, self.opened = asyncio.Event(), asyncio.Event()
        self._server = server
        self._http = LoopbackServer(self._pass_on)

    async def __aenter__(self) -> Self:
        await self._http.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    @property
    def endpoint(self) -> tuple[str, ...]:
        return ("--base-url", f"http://127.0.0.1:{self._http.port}/replay/any/0/v1", "--model", "replay")

    async def _pass_on(self, request: Request) -> Response:
        if request.method == "POST":
            self.asked.set()
            await self.opened.wait()
        async with httpx.AsyncClient(trust_env=False) as client:
            url = f"http://127.0.0.1:{self._server.port}{request.path}"
            answer = await client.request(request.method, url, content=request.body)
        return Response(status=answer.status_code, body=answer.content)


@pytest.mark.long
@pytest.mark.timeout(LIMIT_S)
async def test_the_same_name_again_runs_nothing_and_more_samples_add_exactly_the_difference(command: Command):
    async with model() as server:
        arguments: tuple[str | Path, ...] = ("run", command.offline, *endpoint(server), "--run", "grown")
        first = await asyncio.to_thread(command, *arguments, "-n", "1")
        before = command.query(ALL)
        again = await asyncio.to_thread(command, *arguments, "-n", "1")
        assert command.query(ALL) == before
        assert len(server.requests) == 1
        more = await asyncio.to_thread(command, *arguments, "-n", "3")
    assert [ran.returncode for ran in (first, again, more)] == [0, 0, 0], more.stderr
    assert again.stdout == first.stdout
    assert "3 rollouts, 2 to do" in more.stderr
    rows = command.query(ALL)
    assert rows[0] == before[0]
    assert [row[1:] for row in rows] == [[str(n), "0", "None", "released", "1"] for n in range(3)]
    assert len(server.requests) == 3
    assert more.stdout == "offline__wordcount-1\t3\t0\t0.0\t0\tempty_patch 3\n"


@pytest.mark.long
@pytest.mark.timeout(LIMIT_S)
async def test_a_larger_task_folder_adds_exactly_the_difference(command: Command):
    folder = command.folder / "tasks"
    shutil.copytree(command.offline, folder / "one")
    async with model() as server:
        arguments: tuple[str | Path, ...] = ("run", folder, *endpoint(server), "--run", "grown")
        await asyncio.to_thread(command, *arguments)
        before = command.query(ALL)
        task = shutil.copytree(command.offline, folder / "two") / "task.yaml"
        task.write_text(task.read_text().replace("wordcount-1", "wordcount-2"))
        more = await asyncio.to_thread(command, *arguments)
    assert more.returncode == 0, more.stderr
    assert "2 rollouts, 1 to do" in more.stderr
    assert command.query(f"{ALL}, created_at")[0] == before[0]
    assert command.query("select instance_id, attempts from rollouts order by 1") == [
        ["offline__wordcount-1", "1"],
        ["offline__wordcount-2", "1"],
    ]
    assert [line.split("\t")[1] for line in more.stdout.splitlines()] == ["1", "1"]


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
async def test_a_sample_that_failed_once_gets_a_successor_and_the_totals_are_those_of_a_run_without_failures(
    command: Command,
):
    async with model(failures=1) as server:
        arguments: tuple[str | Path, ...] = ("run", command.offline, *endpoint(server), "-n", "2", "-j", "1")
        flaky = await asyncio.to_thread(command, *arguments, "--run", "flaky")
        rows = command.query(ALL)
        smooth = await asyncio.to_thread(command, *arguments, "--run", "smooth")
    assert (flaky.returncode, smooth.returncode) == (0, 0), flaky.stderr
    assert flaky.stdout == smooth.stdout
    assert "without a reward" not in flaky.stderr
    (failed,) = [row for row in rows if row[4] == "failed"]
    (successor,) = [row for row in rows if row[2] == "1"]
    assert successor[1:] == [failed[1], "1", failed[0], "released", "1"]
    assert len(rows) == 3
    assert f"retry 1 of {failed[0]}: {successor[0]}" in flaky.stderr
    assert "run flaky: 2 of 2 over (0 at work; 2 released)" in flaky.stderr
    assert command.query("select relation from rollouts where retry_no > 0") == [["retry"]]


@pytest.mark.long
@pytest.mark.timeout(LIMIT_S)
async def test_with_retries_0_a_failed_sample_waits_for_a_call_that_names_the_run(command: Command):
    async with model(failures=2) as server:
        arguments: tuple[str | Path, ...] = ("run", command.offline, *endpoint(server), "-n", "2")
        named = (*arguments, "--run", "waits")
        failed = await asyncio.to_thread(command, *named, "--retries", "0")
        assert failed.returncode == 1
        assert command.query("select state, retry_no from rollouts") == [["failed", "0"]] * 2
        answered = await asyncio.to_thread(command, *named, "--retries", "0")
        assert (answered.returncode, answered.stdout) == (1, failed.stdout)
        assert "answering from the store" in answered.stderr
        resumed = await asyncio.to_thread(command, *named)
        assert "2 rollouts, 2 to do (2 for samples that failed before)" in resumed.stderr
        once_more = await asyncio.to_thread(command, *named)
        assert "answering from the store" in once_more.stderr
        smooth = await asyncio.to_thread(command, *arguments, "--run", "smooth")
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout == once_more.stdout == smooth.stdout
    assert command.query("select count(*) from rollouts where run_id = 'waits'") == [["4"]]


@pytest.mark.long
@pytest.mark.timeout(LIMIT_S)
async def test_a_sample_that_always_fails_gets_at_most_so_many_successors_per_call(command: Command):
    async with model(failures=None) as server:
        arguments: tuple[str | Path, ...] = ("run", command.offline, *endpoint(server), "--run", "hopeless")
        first = await asyncio.to_thread(command, *arguments, "--retries", "2")
        chain = command.query("select id, retry_no, parent_id from rollouts order by retry_no")
        again = await asyncio.to_thread(command, *arguments)
    assert (first.returncode, again.returncode) == (1, 1), again.stderr
    assert [row[1:] for row in chain] == [["0", "None"], ["1", chain[0][0]], ["2", chain[1][0]]]
    assert command.query("select max(retry_no), count(*) from rollouts") == [["3", "4"]]
    assert again.stdout == first.stdout == "offline__wordcount-1\t1\t0\t\t1\tfailed:no_llm_call 1\n"
    assert "1 without a reward" in again.stderr


@pytest.mark.long
@pytest.mark.timeout(LIMIT_S)
async def test_without_a_name_a_run_with_nothing_but_failed_samples_left_is_finished(command: Command):
    async with model(failures=1) as server:
        arguments: tuple[str | Path, ...] = ("run", command.offline, *endpoint(server))
        first = await asyncio.to_thread(command, *arguments, "--retries", "0")
        again = await asyncio.to_thread(command, *arguments)
    assert (first.returncode, again.returncode) == (1, 0), again.stderr
    assert "is finished; starting" in again.stderr
    assert command.query("select state, parent_id, count(distinct run_id) from rollouts group by 1, 2") == [
        ["failed", "None", "1"],
        ["released", "None", "1"],
    ]


@pytest.mark.long
@pytest.mark.timeout(LIMIT_S)
async def test_two_processes_that_see_the_same_failure_make_one_successor(command: Command):
    async with model(failures=1) as server, Gate(server) as gate:
        arguments: tuple[str | Path, ...] = ("run", command.offline, *gate.endpoint, "--run", "shared")
        one, two = [await command.start(*arguments) for _ in range(2)]
        assert one.stderr is not None
        assert two.stderr is not None
        waits = [asyncio.create_task(said.readuntil(b"held by worker")) for said in (one.stderr, two.stderr)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:  # only one of the two waits for the other
            wait.cancel()
        await asyncio.wait(waits)
        gate.opened.set()
        said = [await process.communicate() for process in (one, two)]
    assert [process.returncode for process in (one, two)] == [0, 0], said
    assert command.query("select state, retry_no, attempts from rollouts order by retry_no") == [
        ["failed", "0", "1"],
        ["released", "1", "1"],
    ]
    assert said[0][0] == said[1][0] == b"offline__wordcount-1\t1\t0\t0.0\t0\tempty_patch 1\n"


@pytest.mark.long
@pytest.mark.timeout(LIMIT_S)
async def test_a_sample_that_fails_while_the_run_is_being_stopped_is_what_the_same_command_continues_with(
    command: Command,
):
    async with model(failures=1) as server, Gate(server) as gate:
        arguments: tuple[str | Path, ...] = ("run", command.offline, *gate.endpoint)
        process = await command.start(*arguments)
        assert process.stderr is not None
        await gate.asked.wait()
        process.send_signal(signal.SIGINT)
        await process.stderr.readuntil(b"draining ")
        gate.opened.set()
        _, said = await process.communicate()
        again = await asyncio.to_thread(command, *arguments)
    assert process.returncode == 130, said
    assert b"retry 1 of " in said
    assert again.returncode == 0, again.stderr
    assert "continuing run" in again.stderr
    assert command.query("select state, retry_no from rollouts order by retry_no") == [
        ["failed", "0"],
        ["released", "1"],
    ]
