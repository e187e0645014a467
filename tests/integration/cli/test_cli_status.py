"""`rollouts status`: its numbers on both kinds of database, and what it says needs a person."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.cli import render
from orchestrator.cli import status as command_status
from store import rows, standing
from tests.integration.cli.test_cli_db import migrated

if TYPE_CHECKING:
    from store.rollouts import Store
    from tests.conftest import Database
    from tests.integration.cli.conftest import Command

BOTH = pytest.mark.databases("sqlite", "postgresql")
HOUR = 3_600_000


class World:
    """Rows of every odd kind, some of them written past the store."""

    def __init__(self, store: Store, database: Database, new_rollout: Any) -> None:
        self.store, self._database, self._new = store, database, new_rollout
        self.now = store.dialect.now_sql
        self._count = 0

    def ask(self, query: str) -> list[tuple[Any, ...]]:
        return self._database.ask(query.replace("NOW", self.now))

    async def created(self, instance: str = "demo__demo-1") -> str:
        new = self._new(instance_id=instance)
        await self.store.submit([new])
        return str(new.id)

    async def claimed(self) -> tuple[str, rows.Lease]:
        (lease,) = await self.store.claim(limit=1, ids=[await self.created()])
        return lease.rollout_id, lease

    async def given_back(self, delay_ms: int) -> str:
        rollout_id, lease = await self.claimed()
        await self.store.record(lease, give_back=rows.GiveBack(outcome="interrupted", delay_ms=delay_ms))
        return rollout_id

    async def stale(self) -> str:
        rollout_id, _ = await self.claimed()
        self.ask(f"UPDATE rollouts SET lease_until = NOW - 5 WHERE id = '{rollout_id}'")
        return rollout_id

    async def failed(self, failure_class: str, ago_ms: int = 5) -> str:
        """Add a rollout that failed; it has kept its lease, which must count for nothing."""
        rollout_id = await self.created()
        self.ask(
            "UPDATE rollouts SET state = 'failed', version = version + 1, lease_owner = 'w', lease_until = NOW + 60000,"
            f" failure_class = '{failure_class}', finished_at = NOW - {ago_ms} WHERE id = '{rollout_id}'"
        )
        return rollout_id

    async def graded(self, instance: str, *, masked: bool) -> None:
        """Add a rollout with its reward; what is masked is its effective grade, and a second one is not."""
        rollout_id = await self.created(instance)
        ((blob,),) = self.ask("SELECT min(sha256) FROM artifacts")
        for run_no, mask in ((1, masked), (2, not masked)):
            self.ask(f"""INSERT INTO grades (grade_id, rollout_id, fence, patch_sha256, grader_digest, run_no, reason,
                outcome, verdict, reward, mask_sample, evidence, f2p_pass, f2p_total, p2p_pass, p2p_total, test_map,
                log, grader, grader_version, task_sha256, eval_sha256, flags, duration_s, ended_at)
              VALUES ('{rollout_id}-{run_no}', '{rollout_id}', 1, 'p', 'g', {run_no},
                '{"first" if run_no == 1 else "regrade"}', 'no_report', 1, {"NULL" if mask else "0.0"}, {int(mask)},
                'none', 0, 0, 0, 0, '{blob}', '{blob}', 'g', '1', 't', 'e', '[]', 1.0, NOW)""")
        number, reason = ("NULL", "'masked'") if masked else ("0.0", "NULL")
        self.ask(f"""INSERT INTO rewards (rollout_id, grade_id, reward, valid, invalid_reason, reward_fn_version,
            outcome_table, stats, stats_sha256, at)
          VALUES ('{rollout_id}', '{rollout_id}-1', {number}, {int(not masked)}, {reason}, '1', 1, '{{}}', 's', NOW)""")

    def sandbox(self, rollout_id: str | None, status: str, asked_ago_ms: int = 0, tries: int = 0) -> None:
        """Add a row of the ledger; without a rollout it belongs to this store's worker."""
        self._count += 1
        owner = (rollout_id or self.store.worker.worker_id).replace("-", "")
        asked = f"NOW - {asked_ago_ms}" if asked_ago_ms else "NULL"
        self.ask(f"""INSERT INTO sandboxes (key, rollout_id, fence, role, provider, provider_ref, status, ttl_s,
            intent_at, create_deadline, release_requested_at, release_attempts, proof)
          VALUES ('rw-01234567-{owner}-0-{self._count}', {f"'{rollout_id}'" if rollout_id else "NULL"}, 0, 'task',
            'local', 'there', '{status}', 60, NOW, NOW, {asked}, {tries},
            {"'gone'" if status == "released" else "NULL"})""")

    async def look(self) -> standing.Standing:
        return await self.store.history.standing()


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
    assert found.live == standing.Live(backlog=1, at_work=2, waiting=3, unowned=4, forgotten=1, stale=5)
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
    assert (await world.look()).ledger == standing.Ledger(
        open={"intent": 1, "live": 2, "releasing": 1}, without_owner=0, abandoned=0, stuck=0
    )
    for rollout_id in (await world.stale(), await world.given_back(0), await world.failed("internal")):
        world.sandbox(rollout_id, "live")
        world.sandbox(rollout_id, "released")
    found = await world.look()
    assert (found.ledger.without_owner, found.ledger.abandoned) == (3, 3)


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
    assert (await world.look()).ledger == standing.Ledger(
        open={"intent": 0, "live": 0, "releasing": 1}, without_owner=1, abandoned=0, stuck=0
    )
    at_work, _ = await world.claimed()
    world.sandbox(at_work, "releasing", asked_ago_ms=601_000, tries=0)
    world.sandbox(at_work, "releasing", asked_ago_ms=601_000, tries=1)
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
        "sandboxes that could not be released for 10 minutes: 1; run `rollouts clean`",
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
        1, "rollouts that nobody took up for 10 minutes: 1; run `rollouts resume`\n",
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
        "sandboxes without a live owner: 1; run `rollouts clean`",
    ])  # fmt: skip
    world.ask("UPDATE workers SET host = 'elsewhere'")
    found = await world.look()
    assert (found.workers, found.live.at_work, found.live.stale, found.ledger.abandoned) == (1, 1, 0, 0)


def test_a_database_of_an_older_schema_is_told_what_to_do(command: Command):
    command.database.parent.mkdir(exist_ok=True)
    migrated(command.database, "0001")
    ran = command("status")
    assert ran.returncode == 2
    assert "rollouts db upgrade" in ran.stderr


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
