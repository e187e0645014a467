"""`rollouts status`: its numbers on both kinds of database, and what it says needs a person."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.cli import render
from orchestrator.cli import status as command_status
from store import standing
from tests.integration.cli.test_cli_db import migrated
from tests.integration.cli.world import World

if TYPE_CHECKING:
    from store.rollouts import Store
    from tests.conftest import Database
    from tests.integration.cli.conftest import Command

BOTH = pytest.mark.databases("sqlite", "postgresql")
HOUR = 3_600_000
QUIET = standing.Ledger(open={}, without_owner=0, abandoned=0, stuck=0, late=0, resumable=0)


@pytest.fixture
def world(store: Store, database: Database, new_rollout: Any) -> World:
    return World(store, database, new_rollout)


@BOTH
async def test_every_rollout_that_is_not_over_is_counted_in_one_place(world: World):
    empty = await world.look()
    assert (empty.oldest, set(empty.states.values()), empty.workers) == (None, {0}, 1)
    first = await world.created()
    world.ask(f"UPDATE rollouts SET created_at = NOW - {HOUR} WHERE id = '{first}'")
    for _ in range(2):
        await world.claimed()
    for _ in range(3):
        await world.given_back(delay_ms=HOUR)
    last = [await world.given_back(delay_ms=0) for _ in range(4)][-1]
    for _ in range(5):
        await world.stale()
    world.ask(f"UPDATE rollouts SET not_before = NOW - {HOUR} WHERE id = '{last}'")
    await world.failed("cancelled")
    found = await world.look()
    expected = standing.Live(backlog=1, at_work=2, waiting=3, unowned=4, forgotten=0, stale=5)
    assert found.live == expected, "somebody works on their run, and comes to them"
    world.ask(f"UPDATE rollouts SET run_id = 'other' WHERE id IN ('{first}', '{last}')")
    found = await world.look()
    assert found.live == replace(expected, forgotten=2)
    assert found.states == {
        "created": 15, "sandbox_ready": 0, "agent_running": 0, "patched": 0, "graded": 0, "released": 0, "failed": 1,
    }  # fmt: skip
    assert found.oldest is not None
    assert (found.oldest.id, found.oldest.state) == (first, "created")
    assert HOUR <= found.oldest.age_ms < HOUR + 120_000


@BOTH
async def test_an_open_sandbox_has_a_live_owner_or_is_told(world: World):
    at_work, _ = await world.claimed()
    for status in ("intent", "live", "releasing", "released"):
        world.sandbox(at_work, status)
    world.sandbox(None, "live")
    assert (await world.look()).ledger == replace(QUIET, open={"intent": 1, "live": 2, "releasing": 1})
    for rollout_id in (await world.stale(), await world.given_back(0), await world.failed("internal")):
        world.sandbox(rollout_id, "live")
        world.sandbox(rollout_id, "released")
    ledger = (await world.look()).ledger
    assert (ledger.without_owner, ledger.abandoned, ledger.resumable) == (3, 3, 2)


@BOTH
@pytest.mark.parametrize(("status", "time"), [("intent", "create_deadline"), ("live", "expires_at")])
async def test_a_sandbox_whose_time_is_long_over_is_told_although_its_owner_lives(
    world: World, status: str, time: str
):
    at_work, _ = await world.claimed()
    world.sandbox(at_work, status)
    world.ask(f"UPDATE sandboxes SET {time} = NOW - 590000")
    assert (await world.look()).ledger.late == 0
    world.ask(f"UPDATE sandboxes SET {time} = NOW - 610000")
    assert (await world.look()).ledger.late == 1
    world.ask("UPDATE rollouts SET lease_until = NOW - 5")
    ledger = (await world.look()).ledger
    assert (ledger.late, ledger.abandoned) == (0, 1)


@BOTH
@pytest.mark.parametrize(
    "change",
    ["UPDATE workers SET stopping = 1", "UPDATE workers SET heartbeat_at = NOW - 181000"],
    ids=["it ended", "it is silent"],
)
async def test_a_sandbox_of_no_rollout_is_without_owner_when_its_worker_is_gone(world: World, change: str):
    world.sandbox(None, "intent")
    assert (await world.look()).ledger.without_owner == 0
    world.ask(change)
    found = await world.look()
    assert (found.workers, found.ledger.without_owner, found.ledger.abandoned) == (0, 1, 1)


@BOTH
async def test_a_release_under_way_is_not_abandoned_and_one_that_fails_for_long_is_stuck(world: World):
    over = await world.failed("internal")
    world.sandbox(over, "releasing", asked_ago_ms=5_000, tries=1)
    assert (await world.look()).ledger == replace(
        QUIET, open={"intent": 0, "live": 0, "releasing": 1}, without_owner=1
    )
    at_work, _ = await world.claimed()
    world.sandbox(at_work, "releasing", asked_ago_ms=590_000, tries=0)
    world.sandbox(at_work, "releasing", asked_ago_ms=601_000, tries=0)
    world.sandbox(over, "releasing", asked_ago_ms=601_000, tries=1)
    found = await world.look()
    assert (found.ledger.without_owner, found.ledger.abandoned, found.ledger.stuck) == (2, 1, 2)


@BOTH
async def test_failures_count_for_an_hour_and_masks_go_by_the_grade_that_the_reward_names(world: World):
    for failure_class, ago_ms in (
        ("internal", 5), ("llm_unreachable", 5), ("llm_unreachable", HOUR - 60_000), ("internal", HOUR + 1000),
    ):  # fmt: skip
        await world.failed(failure_class, ago_ms)
    for instance, masked in (("a", False), ("b", True), ("b", False), ("b", False), ("c", True), ("c", True)):
        await world.graded(instance, masked=masked)
    found = await world.look()
    assert list(found.failures.items()) == [("llm_unreachable", 2), ("internal", 1)]
    assert (found.answered, found.poisoned) == (0, 0)
    assert found.masked == (
        standing.Masked(instance_id="c", graded=2, masked=2),
        standing.Masked(instance_id="b", graded=3, masked=1),
    )


@BOTH
async def test_all_numbers_are_of_one_moment(world: World, monkeypatch: pytest.MonkeyPatch):
    rollout_id = await world.created()
    ledger = standing._ledger

    def meanwhile(now: int, dead: list[str]) -> Any:
        world.sandbox(rollout_id, "live")
        return ledger(now, dead)

    monkeypatch.setattr(standing, "_ledger", meanwhile)
    assert (await world.look()).ledger.open["live"] == 0
    monkeypatch.undo()
    assert (await world.look()).ledger.open["live"] == 1


@BOTH
async def test_looking_leaves_nothing_behind_that_the_next_reader_could_trip_over(world: World):
    await world.look()
    rollout_id = await world.created()
    assert (await world.store.history.rollout(rollout_id) or {})["state"] == "created"
    assert (await world.look()).live.backlog == 1


async def test_nothing_needs_a_person_while_a_worker_works_through_a_backlog(
    world: World, command: Command, database: Database
):
    at_work, _ = await world.claimed()
    world.sandbox(at_work, "live")
    await world.created()
    await world.given_back(delay_ms=HOUR)
    await world.failed("llm_unreachable")
    ran = command("status", "--check", "--db", database.url)
    assert (ran.returncode, ran.stderr) == (0, "")
    lines = [line.split("\t") for line in ran.stdout.splitlines()]
    assert ["live", "at_work", "1"] in lines
    assert ["live", "backlog", "1"] in lines
    assert ["sandboxes", "live", "1"] in lines
    assert ["failures_last_hour", "llm_unreachable", "1"] in lines
    assert [line[1] for line in lines if line[0] == "oldest"] == [at_work]


async def test_what_needs_a_person_is_named_with_the_command_to_run(
    world: World, command: Command, database: Database
):
    await world.stale()
    world.sandbox(await world.failed("internal"), "live")
    world.sandbox(await world.failed("task_invalid"), "releasing", asked_ago_ms=601_000, tries=2)
    await world.created()
    world.ask("UPDATE workers SET stopping = 1")
    unchecked = command("status", "--db", database.url)
    assert (unchecked.returncode, unchecked.stderr) == (0, "")
    ran = command("status", "--check", "--db", database.url)
    assert ran.returncode == 1
    told, before = (
        [line for line in r.stdout.splitlines() if not line.startswith("oldest\t")] for r in (ran, unchecked)
    )
    assert told == before, "the same but for the age of the oldest"
    assert ran.stderr.splitlines() == [
        "rollouts whose lease ran out, because their worker vanished: 1; run `rollouts resume`",
        "unfinished rollouts while no worker runs: 1; run `rollouts resume`",
        "sandboxes without a live owner: 2; run `rollouts clean`",
        "sandboxes that were not released for 10 minutes: 1; run `rollouts clean`",
        "rollouts that failed as internal in the last hour: 1; run `rollouts list --state failed`",
        "rollouts that failed as task_invalid in the last hour: 1; run `rollouts list --state failed`",
    ]


async def test_a_killed_worker_counts_for_nobody_and_a_rollout_nobody_takes_up_is_told(
    world: World, command: Command, database: Database
):
    given_back = await world.given_back(delay_ms=0)
    world.ask(f"UPDATE rollouts SET not_before = NOW - {HOUR} WHERE id = '{given_back}'")
    alive = command("status", "--check", "--db", database.url)
    assert (alive.returncode, alive.stderr) == (
        1, "rollouts of runs that nobody has worked on for 10 minutes: 1; run `rollouts resume`\n",
    )  # fmt: skip
    at_work, _ = await world.claimed()
    world.sandbox(at_work, "live")
    world.ask("UPDATE workers SET pid_started = '1'")
    found = await world.look()
    assert (found.workers, found.live.at_work, found.live.stale, found.ledger.abandoned) == (0, 0, 1, 1)
    dead = command("status", "--check", "--db", database.url)
    assert (dead.returncode, dead.stderr.splitlines()) == (1, [
        "rollouts whose lease ran out, because their worker vanished: 1; run `rollouts resume`",
        "unfinished rollouts while no worker runs: 1; run `rollouts resume`",
    ]), "whoever resumes may go on in the sandbox, which a sweep would take away"  # fmt: skip
    world.ask("UPDATE workers SET host = 'elsewhere'")
    found = await world.look()
    assert (found.workers, found.live.at_work, found.live.stale, found.ledger.abandoned) == (1, 1, 0, 0)


async def test_causes_that_most_rollouts_fail_of_need_a_person_and_so_does_what_workers_die_on(
    world: World, command: Command, database: Database
):
    def needs() -> list[str]:
        ran = command("status", "--check", "--db", database.url)
        assert ran.returncode == int(bool(ran.stderr))
        return [line.partition(";")[0] for line in ran.stderr.splitlines()]

    for failure_class in ("llm_unreachable", "llm_unreachable", "sandbox_lost"):
        assert needs() == []
        await world.failed(failure_class)
    for _ in range(4):
        await world.failed("cancelled")
    most = "rollouts without a reward of 7 in the last hour, mostly llm_unreachable: 3"
    assert needs() == [most], "what somebody cancelled is no trouble"
    for _ in range(4):
        await world.released()
    assert needs() == [], "most of them have a reward"
    await world.failed("worker_lost")
    poisoned = "rollouts given up since workers died on them in the last hour: 1"
    assert needs() == [poisoned]
    await world.failed("worker_lost", endpoint_kind="session")
    assert needs() == [poisoned, most.replace("7", "13").replace(": 3", ": 4")], (
        "it ended with its only worker"
    )


@pytest.mark.parametrize("revision", ["0001", "0003", "0006"])
def test_a_database_of_an_older_schema_is_told_what_to_do(command: Command, revision: str):
    command.database.parent.mkdir(exist_ok=True)
    migrated(command.database, revision)
    ran = command("status", "--check")
    assert ran.returncode > 0
    assert "rollouts db upgrade" in ran.stderr


async def test_a_database_that_cannot_be_read_does_not_hide_the_others(
    world: World, command: Command, database: Database
):
    await world.created()
    none = command.folder / "none.db"
    ran = command("status", "--check", "--json", "--db", str(none), "--db", database.url)
    assert ran.returncode == 1
    assert json.loads(ran.stdout)["live"]["backlog"] == 1
    assert str(none) in ran.stderr


async def test_json_is_one_object_with_everything(world: World, command: Command, database: Database):
    await world.stale()
    await world.graded("b", masked=True)
    await world.graded("b", masked=False)
    ran = command("status", "--json", "--check", "--db", database.url)
    assert (ran.returncode, len(ran.stdout.splitlines())) == (1, 1)
    said = json.loads(ran.stdout)
    assert said["states"]["created"] == 3
    assert said["live"] == {
        "at_work": 0,
        "backlog": 2,
        "waiting": 0,
        "unowned": 0,
        "forgotten": 0,
        "stale": 1,
    }
    assert said["masked"] == [{"instance_id": "b", "graded": 2, "masked": 1, "share": 0.5}]
    assert said["failures_last_hour"] == {}
    assert [(need["number"], need["run"]) for need in said["needs"]] == [(1, "rollouts resume")]


async def test_people_get_small_tables_and_no_empty_ones(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    for number in range(21):
        await world.graded(f"task-{number:02}", masked=True)
    command_status._tell(await world.look(), render.Form.TABLE)
    shown = capsys.readouterr()
    for title in ("rollouts", "live", "sandboxes", "oldest", "masked"):
        assert f"\n{title} " in f"\n{shown.out}", title
    assert sum(set(line.strip()) == {"─"} for line in shown.out.splitlines()) == 5, "a rule for each table"
    assert max(len(line) for line in shown.out.splitlines()) <= 80
    assert ("task-19" in shown.out, "task-20" in shown.out) == (True, False)
    assert shown.err == "and 1 more with masked grades; --json has all\n"


@pytest.mark.parametrize(
    ("ms", "text"),
    [(0, "0 s"), (59_999, "59 s"), (60_000, "1 min 0 s"), (90_061_000, "1 d 1 h")],
    ids=["nothing", "seconds", "a minute", "a day"],
)
def test_a_time_span_is_told_in_its_two_largest_units(ms: int, text: str):
    assert command_status.duration(ms) == text


def test_without_a_database_status_says_so_and_makes_none(command: Command):
    ran = command("status", "--check")
    assert ran.returncode == 2
    assert "there is no database at" in ran.stderr
    assert not command.database.parent.exists()
