"""A process dies, or a write breaks, at every failpoint with the rollout in every state, on both engines."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from store import failpoints
from tests.integration.durability import facts, operations

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tests.conftest import Database
    from tests.integration.durability.facts import Dump
    from tests.integration.durability.forking import Child, ForkServer

STATES = tuple(operations.WAY)
OF_THE_OWNER = {"heartbeat": "lost", "reacquire": "False"}
"""Writes that ask who they come from: another process gets this answer and changes nothing."""
AT_ONCE = 4
WIDTH = 6
"""Of the names of cases and twins."""


@dataclass(frozen=True)
class Case:
    """One write by a process whose rollout is in one state. Every write may be tried from every state."""

    number: int
    state: str
    write: str
    phase: str

    @property
    def name(self) -> str:
        return f"c{self.number:05d}"

    @property
    def point(self) -> str:
        return f"{self.write}.{self.phase}"


CASES = [
    Case(number, state, write, phase)
    for number, (state, write, phase) in enumerate(
        (state, write, phase)
        for write in failpoints.WRITES
        for phase in failpoints.PHASES
        for state in STATES
    )
]


def one_of_each_point(shift: int) -> list[Case]:
    """Return every point with one state each; seven shifts make up all cases."""
    return [
        case
        for case in CASES
        if STATES.index(case.state) == (failpoints.WRITES.index(case.write) + 3 * failpoints.PHASES.index(case.phase) + shift) % len(STATES)
    ]  # fmt: skip


class Twins:
    """The same writes undisturbed: what the tables hold before, after one and after two of them."""

    def __init__(self, cases: Iterable[Case]) -> None:
        pairs = sorted({(case.state, case.write) for case in cases if case.write in operations.WRITES})
        self.names = {pair: f"t{number:05d}" for number, pair in enumerate(pairs)}
        self.dumps: list[facts.ByOwner] = []
        self.answers: list[dict[tuple[str, str], str]] = []

    def observe(self, child: Child, url: str) -> None:
        assert child.hear() == "taken"
        self.dumps.append(facts.ByOwner(facts.dump(url), WIDTH))
        for _ in range(2):
            child.say("go")
            self.answers.append(dict(zip(self.names, child.hear(), strict=True)))
            self.dumps.append(facts.ByOwner(facts.dump(url), WIDTH))

    def check(self) -> None:
        """Every legal move was made by the first write and known again by the second; no other was ever made."""
        for (state, write), first in self.answers[0].items():
            if write.startswith("transition."):
                legal = any(edge[:2] == (state, write.partition(".")[2]) for edge in operations.EDGES)
                over = state in ("released", "failed")
                second = self.answers[1][state, write]
                expected = (
                    ("Applied", "AlreadyApplied")
                    if legal
                    else ("Terminal",) * 2
                    if over
                    else ("IllegalTransition",) * 2
                )
                assert (first, second) == expected, (state, write)

    def after(self, case: Case, writes: int) -> Dump:
        name = self.names[case.state, case.write]
        return facts.plain(self.dumps[writes].about(name), name)

    def answer(self, case: Case, nth: int) -> str:
        return self.answers[nth - 1][case.state, case.write]


def set_up(forks: ForkServer, url: str, cases: list[Case]) -> tuple[Twins, dict[str, Any]]:
    twins = Twins(cases)
    child = forks.start(
        "failpoint_setup",
        url=url,
        wanted=[[case.name, case.state] for case in cases],
        twins=[[name, *pair] for pair, name in twins.names.items()],
    )
    leases = child.hear()
    twins.observe(child, url)
    child.end()
    twins.check()
    return twins, leases


def die_at_each(forks: ForkServer, url: str, cases: list[Case], leases: dict[str, Any]) -> dict[str, Any]:
    """Kill one process per case at its point; return what each said before: its worker id and its lease."""
    said: dict[str, Any] = {}
    for start in range(0, len(cases), AT_ONCE):
        group = cases[start : start + AT_ONCE]
        children = [
            forks.start(
                "failpoint_death",
                url=url,
                write=case.write,
                point=case.point,
                lease=leases[case.name],
                state=case.state,
            )
            for case in group
        ]
        for case, child in zip(group, children, strict=True):
            last = child.rest()
            assert child.wait() == 137, f"{case}: the point was not passed: {last}"
            said[case.name] = last[0] if last else {"lease": leases[case.name]}
    return said


def await_dead_backends(database: Database) -> None:
    """A server notices the death of a client a moment later; until then a claim skips the rows that it had locked."""
    query = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    while not database.is_sqlite and database.ask(query) != [(0,)]:
        time.sleep(0.01)


def check_death(case: Case, twins: Twins, dumps: list[facts.ByOwner], answer: str) -> None:
    """All of the write is there or nothing of it; the repeated write ends where two or one undisturbed ones do."""
    happened = int(case.phase == "after_commit")
    found, again = (facts.plain(d.about(case.name), case.name) for d in dumps)
    if case.write not in operations.WRITES:
        assert found == again
        return
    assert not facts.difference(found, twins.after(case, happened)), case
    if case.write in OF_THE_OWNER:
        assert (answer, facts.difference(again, found)) == (OF_THE_OWNER[case.write], []), case
        return
    assert answer == twins.answer(case, happened + 1), case
    assert not facts.difference(again, twins.after(case, happened + 1)), case


def check_workers(database: Database, cases: list[Case], said: dict[str, Any]) -> None:
    stopping = dict(database.ask("SELECT worker_id, stopping FROM workers"))
    for case in cases:
        if case.write == "stop":
            assert stopping[said[case.name]["worker"]] == int(case.phase == "after_commit"), case


def check_all(forks: ForkServer, database: Database, cases: list[Case]) -> None:
    url = database.url
    twins, leases = set_up(forks, url, cases)
    said = die_at_each(forks, url, cases, leases)
    await_dead_backends(database)
    dumps = [facts.dump(url)]
    assert facts.violations(dumps[0]) == []
    repeated = [case for case in cases if case.write in operations.WRITES]
    child = forks.start(
        "failpoint_repeat", url=url, done=[(case.write, said[case.name]["lease"]) for case in repeated]
    )
    answers = dict(zip((case.name for case in repeated), child.hear(), strict=True))
    dumps.append(facts.dump(url))
    assert facts.violations(dumps[1]) == []
    parts = [facts.ByOwner(d, WIDTH) for d in dumps]
    for case in cases:
        check_death(case, twins, parts, answers.get(case.name, ""))
    check_workers(database, cases, said)
    child.say("claim")
    claimed = child.hear()
    child.end()
    check_recovered(dumps[1], facts.dump(url), claimed)
    sys.stdout.write(f"{database.kind}: {len(cases)} deaths at {len({c.point for c in cases})} points\n")


def check_recovered(before: Dump, after: Dump, claimed: list[str]) -> None:
    """Whoever is not over can be claimed when the dead worker's lease has run out, once, under a higher fence."""
    fences = {row["id"]: row["fence"] for row in before["rollouts"]}
    live = [row["id"] for row in before["rollouts"] if row["state"] not in ("released", "failed")]
    assert sorted(claimed) == sorted(live)
    for row in after["rollouts"]:
        assert row["fence"] == fences[row["id"]] + (row["id"] in set(live))
    assert facts.violations(after) == []


@pytest.mark.long
@pytest.mark.databases("sqlite")
def test_a_process_that_dies_at_a_failpoint_leaves_all_of_its_write_or_nothing(
    forks: ForkServer, database: Database
):
    check_all(forks, database, one_of_each_point(0))


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.databases("sqlite", "postgresql")
def test_a_process_that_dies_at_any_failpoint_in_any_state_leaves_all_of_its_write_or_nothing(
    forks: ForkServer, database: Database
):
    check_all(forks, database, CASES)


def breaks(cases: list[Case]) -> Iterator[tuple[Case, bool]]:
    """Yield every case twice: the point raises an error, or something that ends the writer's thread."""
    for case in cases:
        if case.write in operations.WRITES and case.write != "heartbeat":
            yield case, case.number % 2 == 0


def check_breaks(forks: ForkServer, database: Database, wanted: list[Case]) -> None:
    broken = list(breaks(wanted))
    cases = [case for case, _ in broken]
    twins, leases = set_up(forks, database.url, cases)
    child = forks.start(
        "failpoint_raise",
        url=database.url,
        cases=[[c.write, c.point, fatal, leases[c.name], c.state] for c, fatal in broken],
    )
    answers = [child.hear() for _ in broken]
    child.end()
    found = facts.dump(database.url)
    assert facts.violations(found) == []
    parts = facts.ByOwner(found, WIDTH)
    for (case, fatal), answer in zip(broken, answers, strict=True):
        refused = case.phase == "before_commit" and not fatal
        expected = f"raised {case.point}" if refused else twins.answer(case, 1)
        assert answer == expected, (case, fatal)
        now = facts.plain(parts.about(case.name), case.name)
        assert not facts.difference(now, twins.after(case, 0 if refused else 1)), (case, fatal)


@pytest.mark.long
def test_a_write_that_breaks_at_a_failpoint_is_told_or_made_once(forks: ForkServer, database: Database):
    check_breaks(forks, database, one_of_each_point(1))


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.databases("sqlite", "postgresql")
def test_a_write_that_breaks_at_any_failpoint_in_any_state_is_told_or_made_once(
    forks: ForkServer, database: Database
):
    check_breaks(forks, database, CASES)


def test_the_short_lane_meets_every_point_and_the_long_one_every_point_in_every_state():
    assert {case.point for case in CASES} | set(failpoints.PLACES) == failpoints.POINTS
    assert len({(case.point, case.state) for case in CASES}) == len(CASES)
    parts = [one_of_each_point(shift) for shift in range(len(STATES))]
    for part in parts:
        assert sorted(case.point for case in part) == sorted({case.point for case in CASES})
    assert sorted(case.number for part in parts for case in part) == [case.number for case in CASES]


def test_a_point_that_is_not_declared_is_refused():
    with pytest.raises(KeyError, match="not declared"):
        failpoints.hit("transition.provision.after_lunch")


async def test_a_write_under_a_name_without_a_failpoint_is_refused(store):
    with pytest.raises(KeyError, match="no failpoint"):
        await store._writer.write("tidy_up", lambda _connection: None)
