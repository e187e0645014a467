"""The one way a rollout changes: compare-and-set on version, fence, lease and edge, with its log row and evidence.

Many changes share one transaction and a handful of statements; a refusal is a value and writes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import sqlalchemy as sa

from store import errors, evidence, guarded, rows
from store.schema import LEDGER_OPEN, TERMINAL, fsm_edges, rollouts, sandboxes, transitions

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from store.dialect import Dialect

Result = rows.Outcome | errors.StoreError


@dataclass(kw_only=True, slots=True)
class Change:
    """One guarded write: a transition when `trigger` is given, else evidence alone. Nobody changes it once it is queued."""

    lease: rows.Lease
    extra: Sequence[rows.Row]
    give_back: rows.GiveBack | None = None
    trigger: str | None = None
    payload: dict[str, Any] = field(default_factory=dict)
    op_id: str = ""
    """The same for every try of one transition, so that a lost acknowledgement is recognised."""
    actor: str = ""
    cancellable: bool = False
    spend: str | None = None
    failure_class: str | None = None
    failure_msg: str | None = None


class _Done(NamedTuple):
    """What a guarded statement returns of a row it changed."""

    id: str
    version: int
    state: str
    now: int


def apply(connection: sa.Connection, dialect: Dialect, changes: Sequence[Change]) -> list[Result]:
    """Make the changes in order, those of different rollouts together; return what came of each.

    A change that contradicts the state machine or the ledger comes back as an error and has written nothing.
    """
    if len(changes) == 1:
        return _together(connection, dialect, changes)
    results: list[Result | None] = [None] * len(changes)
    waiting = list(range(len(changes)))
    while waiting:
        turn: dict[str, int] = {}
        later = [n for n in waiting if turn.setdefault(changes[n].lease.rollout_id, n) != n]
        picked = sorted(turn.values(), key=lambda n: changes[n].lease.rollout_id)
        for n, result in zip(
            picked, _together(connection, dialect, [changes[n] for n in picked]), strict=True
        ):
            results[n] = result
        waiting = later
    return [result for result in results if result is not None]


def _together(connection: sa.Connection, dialect: Dialect, changes: Sequence[Change]) -> list[Result]:
    """Apply changes of distinct rollouts, in the order of their ids (the lock order everywhere)."""
    kinds = [c for c in changes if c.trigger is not None], [c for c in changes if c.trigger is None]
    if all(kinds) and dialect.name != "sqlite":
        everything = {"items": guarded.items("lock", changes)}
        dialect.run(connection, guarded.statement(dialect, "lock"), everything)
    applied: dict[str, _Done] = {}
    make = _one_by_one if dialect.name == "sqlite" else _all_at_once
    for of_kind in kinds:
        if of_kind:
            applied |= {done.id: done for done in make(connection, dialect, of_kind)}
    made = [c for c in changes if c.lease.rollout_id in applied]
    facts = [(c.lease, applied[c.lease.rollout_id].now, c.extra) for c in made if c.extra]
    if facts:
        evidence.apply_all(connection, dialect, facts)
    _end_attempts(connection, dialect, made, applied)
    return [
        rows.Applied(version=applied[c.lease.rollout_id].version, state=applied[c.lease.rollout_id].state)
        if c.lease.rollout_id in applied
        else _classify(connection, dialect, c)
        for c in changes
    ]


def _one_by_one(connection: sa.Connection, dialect: Dialect, changes: list[Change]) -> Iterator[_Done]:
    """Make the changes, and log the moves that were made."""
    for change in changes:
        kind = guarded.kind_of([change])
        given = guarded.parameters(kind, change)
        for id_, version, state, now, *src in dialect.run(
            connection, guarded.statement(dialect, kind), given
        ):
            yield _Done(id_, version, state, now)
            if change.trigger is not None:
                made = {"seq": version, "src": src[0], "dst": state, "at": now}
                dialect.run(connection, guarded.LOG_ONE, given | made)


def _all_at_once(connection: sa.Connection, dialect: Dialect, changes: list[Change]) -> Iterator[_Done]:
    """Make and log the changes in one round trip."""
    kind = guarded.kind_of(changes)
    said = {"items": guarded.items(kind, changes)}
    for row in dialect.run(connection, guarded.statement(dialect, kind), said):
        yield _Done(*row)


def _end_attempts(
    connection: sa.Connection, dialect: Dialect, made: list[Change], applied: dict[str, _Done]
) -> None:
    ended = []
    for change in made:
        done, back = applied[change.lease.rollout_id], change.give_back
        if back is None and done.state in TERMINAL:
            back = rows.GiveBack(outcome="done" if done.state == "released" else "failed")
        if back is not None:
            ended.append(
                {"i": done.id, "f": change.lease.fence, "at": done.now, "how": back.outcome,
                 "what": back.error_class, "why": back.error}
            )  # fmt: skip
    if ended:
        dialect.run(connection, guarded.statement(dialect, "end"), {"items": guarded.as_json(ended)})


def _classify(connection: sa.Connection, dialect: Dialect, change: Change) -> Result:
    """Say why the guard refused, in the order in which a caller must care."""
    lease = change.lease
    row = connection.execute(
        sa.select(rollouts, dialect.now.label("now")).where(rollouts.c.id == lease.rollout_id)
    ).first()
    if row is None:
        return errors.Conflict(f"there is no rollout {lease.rollout_id}", hint="see `rollouts list`")
    if change.trigger is not None and row.version > lease.version and _was_applied(connection, change):
        return rows.AlreadyApplied(version=row.version, state=row.state)
    if row.fence != lease.fence:  # greater, or smaller after a restored backup
        return rows.LeaseLost(fence=row.fence)
    if row.state in TERMINAL:
        return rows.Terminal(state=row.state)
    if row.lease_until is None or row.lease_until <= row.now:
        return rows.LeaseExpired()
    if row.version != lease.version:
        return rows.VersionConflict(version=row.version, state=row.state)
    if change.cancellable and row.cancel_requested_at is not None:
        return rows.Cancelled()
    if change.trigger == "release" and row.state == "graded" and (left := _open_sandboxes(connection, lease)):
        return errors.Conflict(f"rollout {lease.rollout_id} still owns sandboxes: {', '.join(left)}")
    if change.trigger is None or _has_edge(connection, row.state, change.trigger):
        return (
            rows.LeaseExpired()
        )  # what the guard saw is over since: the lease had run out, or a sandbox was open
    return errors.IllegalTransition(
        f"rollout {lease.rollout_id} is {row.state}: no edge {change.trigger!r} leaves it"
    )


def _open_sandboxes(connection: sa.Connection, lease: rows.Lease) -> Sequence[str]:
    return (
        connection.execute(
            sa.select(sandboxes.c.key).where(
                sandboxes.c.rollout_id == lease.rollout_id, sandboxes.c.status.in_(LEDGER_OPEN)
            )
        )
        .scalars()
        .all()
    )


def _has_edge(connection: sa.Connection, state: str, trigger: str) -> bool:
    found = connection.execute(
        sa.select(fsm_edges.c.dst).where(fsm_edges.c.src == state, fsm_edges.c.trig == trigger)
    ).first()
    return found is not None


def _was_applied(connection: sa.Connection, change: Change) -> bool:
    """Look for this very write in the log: the acknowledgement of an earlier try may have been lost."""
    done = connection.execute(
        sa.select(transitions.c.op_id, transitions.c.fence).where(
            transitions.c.rollout_id == change.lease.rollout_id, transitions.c.seq == change.lease.version + 1
        )
    ).first()
    return done is not None and (done.op_id, done.fence) == (change.op_id, change.lease.fence)
