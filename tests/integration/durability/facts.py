"""What must be true of a database after any crash, read straight from its tables."""

from __future__ import annotations

from collections import Counter
from typing import Any

import sqlalchemy as sa

from orchestrator import states
from store import engine, schema

TABLES = (
    schema.rollouts, schema.attempts, schema.transitions, schema.sandboxes, schema.steps, schema.llm_calls,
    schema.patches, schema.grades, schema.rewards, schema.validations,
)  # fmt: skip
_NAMED: dict[str, sa.ColumnElement[str]] = {
    "rollouts": schema.rollouts.c.id,
    "validations": schema.validations.c.grader_digest,
    "sandboxes": schema.sandboxes.c.key,
}
"""Where a row says whose it is, when not by its rollout: in these tests each of these names begins with a rollout's."""
Dump = dict[str, list[dict[str, Any]]]

_EVIDENCE = {"take_patch": "patches", "grade": "rewards"}
"""Trigger -> the table that gets one row in the same transaction, in these tests as in the driver."""


def dump(url: str, prefix: str = "") -> Dump:
    """Return every row of every table about the rollouts whose name begins so, in the order of their keys."""
    parsed = engine.parse_url(url)
    reading = sa.create_engine(engine.plain(parsed), poolclass=sa.pool.NullPool)
    try:
        with reading.connect() as connection:
            return {
                table.name: [
                    dict(row._mapping)
                    for row in connection.execute(
                        sa.select(table)
                        .where(
                            _NAMED.get(table.name, table.c.get("rollout_id", table.c[0])).startswith(prefix)
                        )
                        .order_by(*table.primary_key.columns)
                    )
                ]
                for table in TABLES
            }
    finally:
        reading.dispose()


def _owner(table: sa.Table) -> sa.ColumnElement[str]:
    found: sa.ColumnElement[str] = _NAMED.get(table.name, table.c.get("rollout_id", table.c[0]))
    return found


class ByOwner:
    """A dump divided by whose each row is: names are told apart by their first `width` characters."""

    def __init__(self, whole: Dump, width: int) -> None:
        self._width = width
        self._parts: dict[str, Dump] = {}
        for table in TABLES:
            column = str(_owner(table).key)
            for row in whole[table.name]:
                part = self._parts.setdefault(row[column][:width], {t.name: [] for t in TABLES})
                part[table.name].append(row)

    def about(self, name: str) -> Dump:
        """Return what belongs to the rollout of this name and to what was made beside it."""
        return self._parts.get(name[: self._width], {table.name: [] for table in TABLES})


def plain(part: Dump, prefix: str) -> Dump:
    """Return a dump that compares equal for two rollouts with the same history: no names, times and workers."""
    return {name: [_plain(row, prefix) for row in found] for name, found in part.items()}


def _plain(row: dict[str, Any], prefix: str) -> dict[str, Any]:
    made = {}
    for column, value in row.items():
        if value is not None and (
            column in {"at", "not_before", "lease_until", "create_deadline"} or column.endswith("_at")
        ):
            made[column] = "time" if value else 0
        elif column in {"lease_owner", "worker_id", "actor"} and value is not None:
            made[column] = "worker"
        elif isinstance(value, str):
            made[column] = value.replace(prefix, "R")
        else:
            made[column] = value
    return made


def violations(whole: Dump, *, evidence: bool = True) -> list[str]:
    """Return what contradicts the protocol: version, log and state disagree, or (`evidence`) a fact lacks its move."""
    found: list[str] = []
    log: dict[str, list[dict[str, Any]]] = {}
    counted = {table: Counter(r["rollout_id"] for r in whole[table]) for table in _EVIDENCE.values()}
    for move in whole["transitions"]:
        log.setdefault(move["rollout_id"], []).append(move)
    for row in whole["rollouts"]:
        mine = log.get(row["id"], [])
        found += [f"{row['id']}: {what}" for what in _of_rollout(row, mine)]
        for trigger, table in _EVIDENCE.items() if evidence else ():
            moves = sum(move["trig"] == trigger for move in mine)
            stored = counted[table][row["id"]]
            if moves != stored:
                found.append(f"{row['id']}: {moves} moves {trigger}, {stored} rows of {table}")
    return found


def _of_rollout(row: dict[str, Any], log: list[dict[str, Any]]) -> list[str]:
    found = []
    state = states.State.CREATED
    if [move["seq"] for move in log] != list(range(1, len(log) + 1)):
        found.append(f"the log has a hole: {[move['seq'] for move in log]}")
    for move in log:
        if move["src"] != state.value:
            found.append(f"move {move['seq']} begins in {move['src']}, not in {state}")
        state = states.step(states.State(move["src"]), move["trig"])
    if row["version"] != len(log):
        found.append(f"version {row['version']}, {len(log)} log rows")
    if row["state"] != state.value:
        found.append(f"state {row['state']}, the log says {state}")
    if state in states.TERMINAL and row["lease_owner"] is not None:
        found.append("over, but leased")
    return found


def difference(got: Dump, expected: Dump) -> list[str]:
    """Return what two dumps disagree in, cell by cell."""
    found = []
    for table in expected:
        if len(got[table]) != len(expected[table]):
            found.append(f"{table}: {len(got[table])} rows, expected {len(expected[table])}")
        for one, other in zip(got[table], expected[table], strict=False):
            found += [f"{table}.{c}: {one[c]!r}, expected {other[c]!r}" for c in other if one[c] != other[c]]
    return found
