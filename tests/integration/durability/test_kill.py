"""kill -9 at any moment under load: whatever was acknowledged is there, once, and the rest is whole."""

from __future__ import annotations

import random
import signal
import sqlite3
import sys
from collections import Counter
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.durability import facts

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conftest import Database
    from tests.integration.durability.conftest import OwnServer
    from tests.integration.durability.facts import Dump
    from tests.integration.durability.forking import Child, ForkServer

WIDTH = 12
MOST_ACKS = 150
Ack = list[Any]


def lost_or_doubled(acks: list[Ack], found: Dump) -> list[str]:
    """Return acknowledged facts that are not stored, and facts that are stored twice."""
    fences = {row["id"]: row["fence"] for row in found["rollouts"]}
    moves = {(row["rollout_id"], row["seq"], row["trig"]) for row in found["transitions"]}
    steps = [(row["rollout_id"], row["name"]) for row in found["steps"]]
    calls = [(row["rollout_id"], row["request_sha256"]) for row in found["llm_calls"]]
    stored = set(steps) & set(calls)
    there: dict[str, Callable[..., bool]] = {
        "submit": lambda rollout_id: rollout_id in fences,
        "claim": lambda rollout_id, fence: fences[rollout_id] >= fence,
        "move": lambda *move: move in moves,
        "fact": lambda *fact: fact in stored,
    }
    lost = [f"lost {kind} {what}" for kind, *what in acks if not there[kind](*what)]
    return lost + [f"doubled {what}" for what in {*_doubled(steps), *_doubled(calls)}]


def _doubled(made: list[tuple[str, str]]) -> set[tuple[str, str]]:
    return {fact for fact, times in Counter(made).items() if times > 1}


def hear_acks(child: Child, number: int) -> list[Ack]:
    acks: list[Ack] = []
    while len(acks) < number:
        ack = child.hear()
        assert ack is not None, "the worker ended by itself"
        acks.append(ack)
    return acks


def kill_once(forks: ForkServer, database: Database, name: str, chance: random.Random) -> tuple[int, Dump]:
    """Kill a worker after a number of acknowledgements; return how many it gave and what it left."""
    child = forks.start("load", url=database.url, name=name, width=WIDTH)
    acks = hear_acks(child, chance.randint(1, MOST_ACKS))
    child.signal(signal.SIGKILL)
    acks += child.rest()
    assert child.wait() == -signal.SIGKILL
    found = facts.dump(database.url, name)
    assert lost_or_doubled(acks, found) == []
    assert facts.violations(found) == []
    return len(acks), found


def kill_often(forks: ForkServer, database: Database, kills: int) -> None:
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    acked = rollouts = 0
    for number in range(kills):
        count, found = kill_once(forks, database, f"kill{number:05d}", chance)
        acked += count
        rollouts += len(found["rollouts"])
    if database.is_sqlite:
        with closing(sqlite3.connect(database.file)) as raw:
            assert raw.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            assert raw.execute("PRAGMA foreign_key_check").fetchall() == []
    assert acked >= kills
    sys.stdout.write(
        f"{database.kind}: {kills} kills, {rollouts} rollouts, {acked} acks, 0 violations, seed {seed}\n"
    )


@pytest.mark.slow
def test_a_killed_worker_loses_nothing_that_it_acknowledged(forks: ForkServer, database: Database):
    kill_often(forks, database, 12)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_of_300_killed_workers_none_loses_a_fact_on_sqlite(forks: ForkServer, database: Database):
    kill_often(forks, database, 300)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.databases("postgresql")
def test_of_100_killed_workers_none_loses_a_fact_on_postgresql(forks: ForkServer, database: Database):
    kill_often(forks, database, 100)


@pytest.mark.long
@pytest.mark.postgres
@pytest.mark.timeout(300)
def test_a_database_server_that_crashes_under_load_loses_and_doubles_nothing(
    forks: ForkServer, own_server: OwnServer
):
    crashes = 6
    with forks.start("load", url=own_server.url, name="crash", width=WIDTH, until_told=True) as child:
        acks = hear_acks(child, 50)
        for _ in range(crashes):
            own_server.crash()
            own_server.start()
            acks += hear_acks(child, 200)
        child.say("stop")
        acks += child.rest()
        assert child.wait() == 0
    found = facts.dump(own_server.url)
    assert lost_or_doubled(acks, found) == []
    assert facts.violations(found) == []
    assert {row["state"] for row in found["rollouts"]} == {"released"}
    sys.stdout.write(f"postgresql: {crashes} server crashes, {len(acks)} acks, 0 violations\n")
