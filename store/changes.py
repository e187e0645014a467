"""The one way a rollout changes: compare-and-set on version, fence, lease and edge, with its log row and evidence.

Many changes share one transaction and a handful of statements; a refusal is a value and writes nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import sqlalchemy as sa

from store import errors, evidence, rows
from store.schema import LEDGER_OPEN, TERMINAL, fsm_edges, rollouts, sandboxes, transitions

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from store.dialect import Dialect

Result = rows.Outcome | errors.StoreError


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One guarded write: a transition when `trigger` is given, else evidence alone."""

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
    kinds = {
        "move": [c for c in changes if c.trigger is not None],
        "note": [c for c in changes if c.trigger is None],
    }
    if all(kinds.values()) and dialect.name != "sqlite":
        dialect.run(connection, _statement(dialect, "lock"), {"items": _items(changes)})
    applied: dict[str, _Done] = {}
    for kind, guarded in kinds.items():
        if guarded:
            make = _one_by_one if dialect.name == "sqlite" else _all_at_once
            applied |= {done.id: done for done in make(connection, dialect, kind, guarded)}
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


def _one_by_one(
    connection: sa.Connection, dialect: Dialect, kind: str, guarded: list[Change]
) -> Iterator[_Done]:
    """Make the changes, and log the moves that were made; a statement costs SQLite no round trip, only its own work."""
    for change in guarded:
        given, found = _parameters(change), None
        if change.give_back is None and change.spend is None:
            found = dialect.run(connection, _statement(dialect, f"plain {kind}"), given)
        for id_, version, state, now, *src in found or dialect.run(
            connection, _statement(dialect, kind), given
        ):
            yield _Done(id_, version, state, now)
            if kind == "move":
                made = {"seq": version, "src": src[0], "dst": state, "at": now}
                dialect.run(connection, _LOG_SQLITE, given | made)


def _all_at_once(
    connection: sa.Connection, dialect: Dialect, kind: str, guarded: list[Change]
) -> Iterator[_Done]:
    """Make and log the changes in one statement, which is one round trip to PostgreSQL."""
    for row in dialect.run(connection, _statement(dialect, kind), {"items": _items(guarded)}):
        yield _Done(*row)


_ITEM = {
    "i": str, "v": int, "f": int, "t": str, "c": int, "fc": str, "fm": str, "gb": int, "delay": int,
    "crash": int, "infra": int, "grade": int, "actor": str, "op": str, "payload": dict,
}  # fmt: skip

_SPENT = """crash_count = rollouts.crash_count + item.crash, infra_count = rollouts.infra_count + item.infra,
    grade_count = rollouts.grade_count + item.grade"""
_TERMINAL = ", ".join(f"'{state}'" for state in TERMINAL)
_OPEN = ", ".join(f"'{status}'" for status in LEDGER_OPEN)

_STEP = "state = e.dst, version = rollouts.version + 1, updated_at = {now}"
_GUARD = f"""{{source}} WHERE {{first}}rollouts.id = item.i AND rollouts.version = item.v AND rollouts.fence = item.f
    AND rollouts.lease_until > {{now}} AND e.src = rollouts.state
    AND NOT (item.c = 1 AND rollouts.cancel_requested_at IS NOT NULL)
    AND NOT (e.dst = 'released' AND EXISTS (
      SELECT 1 FROM sandboxes AS s WHERE s.rollout_id = rollouts.id AND s.status IN ({_OPEN})))"""
"""The whole guard of a transition; every conjunct has a test that fails without it."""
_RETURNED = "RETURNING id, version, state, updated_at AS now"

_MOVE = f"""UPDATE rollouts SET {_STEP},
    finished_at = CASE WHEN e.dst IN ({_TERMINAL}) THEN {{now}} END,
    failure_class = CASE WHEN e.dst = 'failed' THEN item.fc END,
    failure_msg = CASE WHEN e.dst = 'failed' THEN item.fm END,
    lease_owner = CASE WHEN item.gb = 0 AND e.dst NOT IN ({_TERMINAL}) THEN rollouts.lease_owner END,
    lease_until = CASE WHEN item.gb = 0 AND e.dst NOT IN ({_TERMINAL}) THEN rollouts.lease_until END,
    not_before = CASE WHEN item.gb = 0 THEN rollouts.not_before ELSE {{now}} + item.delay END,
    {_SPENT}
  {_GUARD} {_RETURNED}"""
_PLAIN_MOVE = f"UPDATE rollouts SET {_STEP} {_GUARD} AND e.dst NOT IN ({_TERMINAL}) {_RETURNED}"
"""For SQLite, which writes every index anew whose columns a statement names, changed or not: a move that ends nothing."""

_EVIDENCE_GUARD = f"""{{source}} WHERE {{first}}rollouts.id = item.i AND rollouts.fence = item.f
    AND rollouts.lease_until > {{now}} AND rollouts.state NOT IN ({_TERMINAL})"""
_NOTE = f"""UPDATE rollouts SET updated_at = {{now}},
    lease_owner = CASE WHEN item.gb = 0 THEN rollouts.lease_owner END,
    lease_until = CASE WHEN item.gb = 0 THEN rollouts.lease_until END,
    not_before = CASE WHEN item.gb = 0 THEN rollouts.not_before ELSE {{now}} + item.delay END,
    {_SPENT}
  {_EVIDENCE_GUARD} {_RETURNED}"""
_PLAIN_NOTE = f"UPDATE rollouts SET updated_at = {{now}} {_EVIDENCE_GUARD} {_RETURNED}"


_LOG = "INSERT INTO transitions (rollout_id, seq, src, trig, dst, fence, actor, op_id, at, payload)"
_LOG_SQLITE = f"{_LOG} VALUES (:i, :seq, :src, :t, :dst, :f, :actor, :op, :at, :payload)"
_LOG_POSTGRESQL = f"{_LOG} SELECT id, version, src, t, state, f, actor, op, now, payload FROM done"
_DESTINATION = "(SELECT dst FROM fsm_edges WHERE src = rollouts.state AND trig = :t)"
_LED_HERE = """, coalesce((SELECT t.dst FROM transitions AS t
  WHERE t.rollout_id = rollouts.id AND t.seq = rollouts.version - 1), 'created')"""
"""The source of the edge that was taken, which RETURNING cannot name: it is where the move before led to."""
_LOCKING = """FROM items AS item JOIN rollouts AS r ON r.id = item.i
  WHERE r.id = ANY (ARRAY(SELECT i FROM items)) ORDER BY r.id FOR UPDATE OF r"""
"""Of an array that is not known when the statement is planned, PostgreSQL expects few elements, and goes by the primary
key however small the table is."""


_LOCKED_FIRST = "(SELECT count(*) FROM locked) > 0 AND "
"""Asked once, before anything else: without it the planner may look at the rows before it locks them."""


_TEXTS = {"move": _MOVE, "plain move": _PLAIN_MOVE, "note": _NOTE, "plain note": _PLAIN_NOTE}


@cache
def _statement(dialect: Dialect, kind: str) -> str:
    """Return a statement of `_TEXTS`, `lock` or `end`, made once."""
    if kind == "end":
        return dialect.driver_sql(_END.format(rows=dialect.rows_of(_ENDED)))
    return _for_one(dialect, kind) if dialect.name == "sqlite" else _for_many(dialect, kind)


_NAMES = re.compile(r"\be\.src = rollouts\.state|\be\.dst\b|\bitem\.(\w+)")


def _for_one(dialect: Dialect, kind: str) -> str:
    """Return the statement for one change whose columns are parameters: SQLite is slow at joining an UPDATE."""

    def alone(found: re.Match[str]) -> str:
        if found[1]:
            return f":{found[1]}"
        return _DESTINATION if found[0] == "e.dst" else f"{_DESTINATION} IS NOT NULL"

    changed = _NAMES.sub(alone, _TEXTS[kind].format(now=dialect.now_sql, source="", first=""))
    return changed + (_LED_HERE if kind.endswith("move") else "")


def _for_many(dialect: Dialect, kind: str) -> str:
    """Return the statement that locks in the order of ids, changes and logs, in one round trip to PostgreSQL.

    `lock` takes the rows of both kinds first where a batch has both.
    """
    items = f"WITH items AS MATERIALIZED (SELECT item.* FROM {dialect.rows_of(_ITEM)})"
    if kind == "lock":
        return dialect.driver_sql(f"{items} SELECT r.id {_LOCKING}")
    source, returned = "FROM locked AS item", "RETURNING rollouts.id"
    if kind == "move":
        source += " JOIN fsm_edges AS e ON e.trig = item.t"
        returned += ", e.src, item.t, item.f, item.actor, item.op, item.payload"
    changed = _TEXTS[kind].format(now=dialect.now_sql, source=source, first=_LOCKED_FIRST)
    return dialect.driver_sql(
        f"{items}, locked AS MATERIALIZED (SELECT item.* {_LOCKING}),"
        f" done AS ({changed.replace('RETURNING id', returned)})"
        + (f", logged AS ({_LOG_POSTGRESQL})" if kind == "move" else "")
        + " SELECT id, version, state, now FROM done"
    )


def _items(changes: Sequence[Change]) -> str:
    items = [_item(change) for change in changes]
    text = rows.canonical_json(items)
    return text if _NUL not in text else rows.canonical_json(rows.storable(items))


def _parameters(change: Change) -> dict[str, Any]:
    """Return the item as parameters; of its texts only the payload and the message may hold what nobody chose."""
    item = _item(change)
    payload = rows.canonical_json(change.payload)
    if _NUL in payload:
        payload = rows.canonical_json(rows.storable(change.payload))
    item["payload"], item["fm"] = payload, rows.storable(change.failure_msg)
    return item


_NUL = "\\u0000"
"""A NUL character as JSON has it; to look for it in the text is faster than in every value."""


def _item(change: Change) -> dict[str, Any]:
    back = change.give_back
    spent = (change.spend, None if back is None else back.spend)
    return {
        "i": change.lease.rollout_id,
        "v": change.lease.version,
        "f": change.lease.fence,
        "t": change.trigger,
        "c": int(change.cancellable),
        "fc": change.failure_class,
        "fm": change.failure_msg,
        "gb": int(back is not None),
        "delay": back.delay_ms if back is not None else 0,
        "crash": spent.count("crash"),
        "infra": spent.count("infra"),
        "grade": spent.count("grade"),
        "actor": change.actor,
        "op": change.op_id,
        "payload": change.payload,
    }


_ENDED = {"i": str, "f": int, "at": int, "how": str, "what": str, "why": str}
_END = """UPDATE attempts SET ended_at = item.at, outcome = item.how, error_class = item.what, error = item.why
  FROM {rows} WHERE attempts.rollout_id = item.i AND attempts.fence = item.f"""


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
                 "what": back.error_class, "why": rows.storable(back.error)}
            )  # fmt: skip
    if ended:
        dialect.run(connection, _statement(dialect, "end"), {"items": rows.canonical_json(ended)})


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
    if change.trigger == "release" and row.state == "graded":
        left = connection.execute(
            sa.select(sandboxes.c.key).where(
                sandboxes.c.rollout_id == lease.rollout_id, sandboxes.c.status.in_(LEDGER_OPEN)
            )
        ).scalars()
        return errors.Conflict(f"rollout {lease.rollout_id} still owns sandboxes: {', '.join(left)}")
    if change.trigger is None or _has_edge(connection, row.state, change.trigger):
        return rows.LeaseExpired()  # it had run out when the guard looked, and was taken back since
    return errors.IllegalTransition(
        f"rollout {lease.rollout_id} is {row.state}: no edge {change.trigger!r} leaves it"
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
