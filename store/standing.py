"""Where everything stands at one moment: who works on what, what waits, what nobody owns any more.

All of it is read in one transaction and measured with one reading of the database's clock, so that the numbers agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from store import place
from store import workers as process
from store.schema import IS_LIVE, LEDGER_OPEN, STATES, TERMINAL, grades, rewards, rollouts, sandboxes, workers

if TYPE_CHECKING:
    from pathlib import Path

    from sqlalchemy.ext.asyncio import AsyncConnection

    from store.dialect import Dialect

SILENT_MS = 180_000
"""A worker without a heartbeat for so long counts as gone."""
OVERDUE_MS = 600_000
"""A release takes seconds; one that was asked for so long ago has met an obstacle."""
RECENT_MS = 3_600_000
_KEY_OF_WORKER = (13, 32)
"""Where a sandbox key that belongs to no rollout names its worker (see `orchestrator.identity.sandbox_key`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Live:
    """Rollouts that are not over, each counted once (`forgotten` ones also as `unowned`)."""

    at_work: int
    """With a lease that has not run out, of somebody who may live."""
    backlog: int
    """Never claimed."""
    waiting: int
    """Given back, and not due yet."""
    unowned: int
    """Given back, due, and claimed by nobody since."""
    forgotten: int
    """Nobody took them up for longer than `OVERDUE_MS`, and nobody works on their run."""
    stale: int
    """With a lease that ran out, or whose owner is seen from here to have gone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ledger:
    """Sandboxes that are not proven gone."""

    open: dict[str, int]
    """Status -> rows, for every status that is open."""
    without_owner: int
    """Their rollout is over or without a live lease; of no rollout, and their worker is gone."""
    abandoned: int
    """Of those without an owner the ones that are not just being released either."""
    stuck: int
    """Asked to be released longer than `OVERDUE_MS` ago: a release failed, or its owner lives and does not come to it."""
    late: int
    """Their time was over longer than `OVERDUE_MS` ago, and their owner lives and keeps them."""
    resumable: int
    """Of the abandoned ones those of unfinished rollouts, which whoever resumes those settles."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Oldest:
    """The rollout that has been going on for longest."""

    id: str
    run_id: str
    instance_id: str
    state: str
    age_ms: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Masked:
    """A task some of whose effective grades do not count, because the task itself is in doubt."""

    instance_id: str
    graded: int
    masked: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """A database at one moment, in epoch milliseconds of its own clock."""

    at: int
    states: dict[str, int]
    """State -> rollouts, for every state."""
    live: Live
    workers: int
    """That gave a sign of life lately, are not ending, and are not seen from here to have gone."""
    ledger: Ledger
    oldest: Oldest | None
    failures: dict[str, int]
    """Failure class -> rollouts that failed so in the last hour, the most frequent first."""
    answered: int
    """Rollouts that were released in the last hour."""
    poisoned: int
    """Rollouts given up in the last hour because worker after worker died on them."""
    masked: tuple[Masked, ...]
    """The most affected task first."""


async def read(connection: AsyncConnection, dialect: Dialect) -> Standing:
    """Read everything in one transaction, which must not have begun."""
    if dialect.name == "sqlite":
        await connection.exec_driver_sql("BEGIN")  # its driver begins by itself only for writes
    else:
        await connection.execution_options(isolation_level="REPEATABLE READ")
    now = int((await connection.execute(sa.select(dialect.now))).scalar_one())

    async def rows(query: sa.Select[Any]) -> list[sa.Row[Any]]:
        return list((await connection.execute(query)).fetchall())

    states = {row.state: row.n for row in await rows(_states())}
    heard_of = await rows(sa.select(workers).where(sa.or_(sa.and_(*_is_alive(now)), _has_a_lease(now))))
    dead = _seen_dead(heard_of)
    (live,) = await rows(_live(now, dead))
    oldest = await rows(_oldest())
    ended = await rows(_ended(now))
    return Standing(
        at=now,
        states={state: states.get(state, 0) for state in STATES},
        live=Live(**live._mapping),
        workers=sum(_is_heard(row, now) and row.worker_id not in dead for row in heard_of),
        ledger=_ledger_of(await rows(_ledger(now, dead))),
        oldest=Oldest(
            **{k: v for k, v in oldest[0]._mapping.items() if k != "created_at"},
            age_ms=now - oldest[0].created_at,
        )
        if oldest
        else None,
        failures={row.failure_class: row.n for row in ended if row.failure_class is not None},
        answered=sum(row.n for row in ended if row.failure_class is None),
        poisoned=sum(row.poisoned for row in ended),
        masked=tuple(Masked(**row._mapping) for row in await rows(_masked())),
    )


def _counted(condition: sa.ColumnElement[bool], name: str) -> sa.Label[Any]:
    return sa.func.count().filter(condition).label(name)


def _states() -> sa.Select[Any]:
    return sa.select(rollouts.c.state, sa.func.count().label("n")).group_by(rollouts.c.state)


def _held(now: int, dead: list[str]) -> sa.ColumnElement[bool]:
    """Say whether somebody has the rollout who may live."""
    r = rollouts.c
    return sa.and_(r.lease_until >= now, r.lease_owner.not_in(dead))


def _live(now: int, dead: list[str]) -> sa.Select[Any]:
    r = rollouts.c
    free, claimed = r.lease_until.is_(None), r.fence > 0
    since = sa.case((claimed, r.not_before), else_=r.created_at)
    in_work = sa.select(r.run_id).where(IS_LIVE, _held(now, dead)).distinct()
    forgotten = free & (since <= now - OVERDUE_MS) & r.run_id.not_in(in_work)
    return (
        sa.select(
            _counted(_held(now, dead), "at_work"),
            _counted(free & ~claimed, "backlog"),
            _counted(free & claimed & (r.not_before > now), "waiting"),
            _counted(free & claimed & (r.not_before <= now), "unowned"),
            _counted(forgotten, "forgotten"),
            _counted(~free & ~_held(now, dead), "stale"),
        )
        .select_from(rollouts)
        .where(IS_LIVE)
    )


def _oldest() -> sa.Select[Any]:
    r = rollouts.c
    query = sa.select(r.id, r.run_id, r.instance_id, r.state, r.created_at)
    return query.where(IS_LIVE).order_by(r.created_at, r.id).limit(1)


def _is_alive(now: int) -> tuple[sa.ColumnElement[bool], ...]:
    return (workers.c.stopping == 0, workers.c.heartbeat_at >= now - SILENT_MS)


def _is_heard(row: sa.Row[Any], now: int) -> bool:
    return bool(row.stopping == 0 and row.heartbeat_at >= now - SILENT_MS)


def _has_a_lease(now: int) -> sa.ColumnElement[bool]:
    owners = sa.select(rollouts.c.lease_owner).where(IS_LIVE, rollouts.c.lease_until >= now)
    return workers.c.worker_id.in_(owners)


def _seen_dead(heard_of: list[sa.Row[Any]]) -> list[str]:
    here = process.this_process("")
    return [
        row.worker_id for row in heard_of if process.runs(process.Recorded.of(row._mapping), here) is False
    ]


def _ledger(now: int, dead: list[str]) -> sa.Select[Any]:
    s = sandboxes.c
    worker = sa.func.replace(workers.c.worker_id, "-", "") == sa.func.substr(s.key, *_KEY_OF_WORKER)
    living = sa.and_(worker, *_is_alive(now), workers.c.worker_id.not_in(dead))
    owned_by_worker = sa.exists().where(living).correlate(sandboxes)
    owned = sa.case(
        (s.rollout_id.is_(None), owned_by_worker),
        else_=sa.and_(
            rollouts.c.state.not_in(TERMINAL),
            sa.func.coalesce(_held(now, dead), sa.false()),
        ),
    )
    asked_lately = (s.status == "releasing") & (s.release_requested_at >= now - OVERDUE_MS)
    overdue = (s.status == "releasing") & (s.release_requested_at < now - OVERDUE_MS)
    time_is_over = sa.case((s.status == "intent", s.create_deadline), (s.status == "live", s.expires_at))
    late = owned & sa.func.coalesce(time_is_over < now - OVERDUE_MS, sa.false())
    abandoned = ~owned & ~sa.func.coalesce(asked_lately, sa.false())
    unfinished = sa.func.coalesce(rollouts.c.state.not_in(TERMINAL), sa.false())
    # Written out, never bound: only so does the query use the partial index.
    is_open = s.status.in_([sa.literal_column(f"'{status}'") for status in LEDGER_OPEN])
    return (
        sa.select(
            s.status,
            sa.func.count().label("n"),
            _counted(~owned, "without_owner"),
            _counted(abandoned, "abandoned"),
            _counted(((s.release_attempts > 0) | owned) & overdue, "stuck"),
            _counted(late, "late"),
            _counted(abandoned & unfinished, "resumable"),
        )
        .select_from(sandboxes.outerjoin(rollouts, rollouts.c.id == s.rollout_id))
        .where(is_open)
        .group_by(s.status)
    )


def _ledger_of(found: list[sa.Row[Any]]) -> Ledger:
    numbers = {row.status: row.n for row in found}
    return Ledger(
        open={status: numbers.get(status, 0) for status in LEDGER_OPEN},
        without_owner=sum(row.without_owner for row in found),
        abandoned=sum(row.abandoned for row in found),
        stuck=sum(row.stuck for row in found),
        late=sum(row.late for row in found),
        resumable=sum(row.resumable for row in found),
    )


def _ended(now: int) -> sa.Select[Any]:
    """Count what ended lately by its failure class, which what was released has none of."""
    r = rollouts.c
    number = sa.func.count().label("n")
    # A session's rollout ends so with its only worker; any other one after so many of them that it may be the reason.
    poisoned = _counted((r.failure_class == "worker_lost") & (r.endpoint_kind == "stateless"), "poisoned")
    return (
        sa.select(r.failure_class, number, poisoned)
        .where(r.state.in_(TERMINAL), r.finished_at >= now - RECENT_MS)
        .group_by(r.failure_class)
        .order_by(number.desc(), r.failure_class)
    )


def _masked() -> sa.Select[Any]:
    """Go by effective grades, those that rewards name: a later grade of the same rollout counts for nothing."""
    masked = _counted(grades.c.mask_sample == 1, "masked")
    return (
        sa.select(rollouts.c.instance_id, sa.func.count().label("graded"), masked)
        .select_from(rewards.join(grades, grades.c.grade_id == rewards.c.grade_id))
        .join(rollouts, rollouts.c.id == rewards.c.rollout_id)
        .group_by(rollouts.c.instance_id)
        .having(sa.func.count().filter(grades.c.mask_sample == 1) > 0)
        .order_by(masked.desc(), rollouts.c.instance_id)
    )


def file_system(file: Path, *, mounts: Path = place.MOUNTS) -> tuple[str, bool]:
    """Return the kind of file system below a SQLite file, there or not, and whether such a file is safe on it."""
    kind = place.file_system(file.parent, mounts)
    return kind, kind not in place.NETWORK_FILE_SYSTEMS
