"""`rollouts resume` among rollouts that it cannot go on with: they are told, and the others are finished."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.cli import plan
from orchestrator.settings import Settings
from tests.integration.cli.test_cli_resume import killed_at

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from store import rows
    from store.rollouts import Store
    from tests.conftest import Database
    from tests.integration.cli.conftest import Command

WHOLE: dict[str, Any] = {"settings": Settings().model_dump(mode="json"), "origin": {}, "repo_source": None}


def replayed(path: Path) -> dict[str, Any]:
    settings = {**WHOLE["settings"], "llm": {"base_url": "replay:turns@0", "model": "replay"}}
    return {**WHOLE, "settings": settings, "origin": {"replay": str(path)}}


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ([], "input: "),
        ({}, "settings: "),
        ({**WHOLE, "settings": 5}, "settings: "),
        ({**WHOLE, "settings": {"sandbox": {"provider": "nobodys"}}}, "sandbox.provider: "),
        ({**WHOLE, "settings": {"no_such": 1}}, "unknown key 'no_such'"),
        ({**WHOLE, "origin": None}, "origin: "),
        ({**WHOLE, "repo_source": {"path": "/x"}}, "repo_source.kind: "),
    ],
)
async def test_input_that_cannot_be_read_is_told_and_costs_its_neighbours_nothing(
    store: Store, database: Database, new_rollout: Callable[..., rows.NewRollout], given: Any, why: str
):
    odd, whole = new_rollout(input=WHOLE), new_rollout(input=WHOLE)
    await store.submit([odd, whole])
    database.ask(f"UPDATE rollouts SET input = '{json.dumps(given)}' WHERE id = '{odd.id}'")
    found = {item.row["id"]: item.blocked for item in await plan.make(store, ids=None, run=None, user=None)}
    assert "cannot be read by this version" in found[odd.id]
    assert why in found[odd.id]
    assert "cannot be read" not in found[whole.id]


async def test_recorded_turns_that_are_a_folder_are_not_there(
    store: Store, new_rollout: Callable[..., rows.NewRollout], tmp_path: Path
):
    await store.submit([new_rollout(input=replayed(tmp_path))])
    (item,) = await plan.make(store, ids=None, run=None, user=None)
    assert item.blocked == f"its recorded turns {tmp_path} are not here"


@pytest.mark.long
@pytest.mark.timeout(180)
async def test_what_cannot_go_on_here_is_left_and_everything_else_is_finished_and_listed(command: Command):
    await killed_at(command, 1)
    with closing(sqlite3.connect(command.database)) as raw, raw:
        raw.execute("UPDATE rollouts SET fsm_version = 99 WHERE sample = 1")
        raw.execute(
            "UPDATE rollouts SET input = json_set(input, '$.settings.sandbox.python', '/nope/python') WHERE sample = 2"
        )
    before = command.query("select fence, state from rollouts where sample > 0 order by sample")
    resumed = await asyncio.to_thread(command, "resume", "--json")
    assert resumed.returncode == 1, resumed.stderr
    ended = [json.loads(line) for line in resumed.stdout.splitlines()]
    assert [(row["now"], row["reward"]) for row in ended] == [("released", 1.0)]
    assert "a newer version of this program submitted it" in resumed.stderr
    assert "/nope/python" in resumed.stderr
    assert command.query("select fence, state from rollouts where sample > 0 order by sample") == before


@pytest.mark.long
@pytest.mark.timeout(180)
async def test_a_run_ends_and_says_so_when_a_newer_version_has_to_finish_one_of_its_rollouts(
    command: Command,
):
    await killed_at(command, 1)
    with closing(sqlite3.connect(command.database)) as raw, raw:
        raw.execute("UPDATE rollouts SET fsm_version = 99 WHERE sample = 1")
    again = await asyncio.to_thread(
        command, "run", command.offline, "--model", command.replay, "-n", "3", "-j", "1", "--run", "killed",
        timeout_s=120,
    )  # fmt: skip
    assert again.returncode == 1, again.stderr
    assert "a newer version of this program submitted it: continue it with that" in again.stderr
    assert "unfinished:created 1" in again.stdout
    assert command.query("select state from rollouts order by sample") == [
        ["released"],
        ["created"],
        ["released"],
    ]


@pytest.mark.long
@pytest.mark.timeout(180)
async def test_of_several_databases_only_those_with_the_rollout_or_the_run_are_concerned(command: Command):
    await killed_at(command, 1)
    ((rollout_id, run),) = command.query("select id, run_id from rollouts where sample = 0")
    other = command.folder / "other.db"
    command("db", "upgrade", "--db", str(other))
    names = ("--db", str(other), "--db", str(command.database))
    one = await asyncio.to_thread(command, "resume", rollout_id[:30], *names, "--csv")
    assert one.returncode == 0, one.stderr
    assert [line.split(",")[0] for line in one.stdout.splitlines()] == ["id", rollout_id]
    rest = await asyncio.to_thread(command, "resume", "--run", run, *names, "--json")
    assert rest.returncode == 0, rest.stderr
    assert len(rest.stdout.splitlines()) == 2
    over = await asyncio.to_thread(command, "resume", rollout_id, *names)
    assert (over.returncode, over.stderr) == (0, f"rollout {rollout_id} is released already: reward 1.0\n")
    nowhere = await asyncio.to_thread(command, "resume", "--run", "nobodys", *names)
    assert (nowhere.returncode, "there is no run 'nobodys'" in nowhere.stderr) == (2, True)
