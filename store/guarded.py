"""The guarded statements by which a rollout changes, in each engine's form, and what a change says in them.

SQLite takes one change at a time, as parameters: a statement costs it no round trip, and joining an UPDATE costs it
much. PostgreSQL takes all changes of a batch at once, as JSON.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any

from store import rows
from store.schema import LEDGER_OPEN, TERMINAL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from store.changes import Change
    from store.dialect import Dialect

_PLAIN = {"i": str, "v": int, "f": int, "t": str, "c": int, "actor": str, "op": str, "payload": dict}
_GIVEN = {"i": str, "f": int, "gb": int, "delay": int, "crash": int, "infra": int, "grade": int}
_COLUMNS: dict[str, dict[str, type]] = {
    "move": {**_PLAIN, **_GIVEN, "fc": str, "fm": str},
    "plain move": _PLAIN,
    "note": _GIVEN,
    "plain note": {"i": str, "f": int},
    "lock": {"i": str},
    "end": {"i": str, "f": int, "at": int, "how": str, "what": str, "why": str},
}
"""Kind of statement -> what each change says in it."""
_ENDING = ("release", "fail")


def kind_of(changes: Sequence[Change]) -> str:
    """Return the statement for these changes, which are all moves or all evidence: a plain one where none ends anything."""
    kind = "note" if changes[0].trigger is None else "move"
    is_plain = all(c.give_back is None and c.spend is None and c.trigger not in _ENDING for c in changes)
    return f"plain {kind}" if is_plain else kind


def items(kind: str, changes: Sequence[Change]) -> str:
    """Return what the changes say, as JSON."""
    return as_json([_item(kind, change) for change in changes])


def as_json(values: list[dict[str, Any]]) -> str:
    """Return the JSON text of what goes into a statement."""
    text = rows.canonical_json(values)
    return text if _NUL not in text else rows.canonical_json(rows.storable(values))


_NUL = "\\u0000"
"""A NUL character as JSON has it; to look for it in the text is faster than in every value."""


def parameters(kind: str, change: Change) -> dict[str, Any]:
    """Return what the change says, as parameters; only payload and message hold what nobody here chose."""
    item = _item(kind, change)
    if "payload" in item:
        payload = rows.canonical_json(change.payload)
        item["payload"] = (
            payload if _NUL not in payload else rows.canonical_json(rows.storable(change.payload))
        )
    if "fm" in item:
        item["fm"] = rows.storable(change.failure_msg)
    return item


def _item(kind: str, change: Change) -> dict[str, Any]:
    item: dict[str, Any] = {"i": change.lease.rollout_id, "f": change.lease.fence}
    if change.trigger is not None and kind != "lock":
        item |= {
            "v": change.lease.version,
            "t": change.trigger,
            "c": int(change.cancellable),
            "actor": change.actor,
            "op": change.op_id,
            "payload": change.payload,
        }
    if kind == "move":
        item |= {"fc": change.failure_class, "fm": change.failure_msg}
    if kind in ("move", "note"):
        back = change.give_back
        spent = (change.spend, None if back is None else back.spend)
        item |= {
            "gb": int(back is not None),
            "delay": back.delay_ms if back is not None else 0,
            **{budget: spent.count(budget) for budget in ("crash", "infra", "grade")},
        }
    return item


_SPENT = """crash_count = rollouts.crash_count + item.crash, infra_count = rollouts.infra_count + item.infra,
    grade_count = rollouts.grade_count + item.grade"""
_TERMINAL = ", ".join(f"'{state}'" for state in TERMINAL)
_OPEN = ", ".join(f"'{status}'" for status in LEDGER_OPEN)

_STEP = "state = e.dst, version = rollouts.version + 1, updated_at = {now}"
_PLAIN_GUARD = """{source} WHERE {first}rollouts.id = item.i AND rollouts.version = item.v AND rollouts.fence = item.f
    AND rollouts.lease_until > {now} AND e.src = rollouts.state
    AND NOT (item.c = 1 AND rollouts.cancel_requested_at IS NOT NULL)"""
_GUARD = f"""{_PLAIN_GUARD}
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
_PLAIN_MOVE = f"UPDATE rollouts SET {_STEP} {_PLAIN_GUARD} AND e.dst NOT IN ({_TERMINAL}) {_RETURNED}"
"""A move that ends nothing says less, and asks less: PostgreSQL would plan for sandboxes that it never looks at, and
SQLite writes every index anew whose columns a statement names."""

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
LOG_ONE = f"{_LOG} VALUES (:i, :seq, :src, :t, :dst, :f, :actor, :op, :at, :payload)"
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


_END = """UPDATE attempts SET ended_at = item.at, outcome = item.how, error_class = item.what, error = item.why
  FROM {rows} WHERE attempts.rollout_id = item.i AND attempts.fence = item.f"""
_TEXTS = {"move": _MOVE, "plain move": _PLAIN_MOVE, "note": _NOTE, "plain note": _PLAIN_NOTE}


@cache
def statement(dialect: Dialect, kind: str) -> str:
    """Return the statement of a kind in `_COLUMNS`, made once."""
    if kind == "end":
        return dialect.driver_sql(_END.format(rows=dialect.rows_of(_COLUMNS[kind])))
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
    items = f"WITH items AS MATERIALIZED (SELECT item.* FROM {dialect.rows_of(_COLUMNS[kind])})"
    if kind == "lock":
        return dialect.driver_sql(f"{items} SELECT r.id {_LOCKING}")
    source, returned = "FROM locked AS item", "RETURNING rollouts.id"
    if kind.endswith("move"):
        source += " JOIN fsm_edges AS e ON e.trig = item.t"
        returned += ", e.src, item.t, item.f, item.actor, item.op, item.payload"
    changed = _TEXTS[kind].format(now=dialect.now_sql, source=source, first=_LOCKED_FIRST)
    return dialect.driver_sql(
        f"{items}, locked AS MATERIALIZED (SELECT item.* {_LOCKING}),"
        f" done AS ({changed.replace('RETURNING id', returned)})"
        + (f", logged AS ({_LOG_POSTGRESQL})" if kind.endswith("move") else "")
        + " SELECT id, version, state, now FROM done"
    )
