"""Who may work on what: submit, claim, renew. A claim raises the fence, so whoever held the rollout before is shut out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from store import errors, evidence, rows
from store.schema import IS_LIVE, deliveries, rollouts, validations, workers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from store.dialect import Dialect
    from store.workers import WorkerIdentity


def register(connection: sa.Connection, dialect: Dialect, worker: WorkerIdentity) -> None:
    """Write down this process before it claims anything."""
    at = now(connection, dialect)
    connection.execute(
        sa.insert(workers),
        {
            "worker_id": worker.worker_id, "host": worker.host, "boot_id": worker.boot_id, "pid_ns": worker.pid_ns,
            "pid": worker.pid, "pid_started": worker.pid_started, "code_version": worker.code_version,
            "started_at": at, "heartbeat_at": at,
        },
    )  # fmt: skip


def stop(connection: sa.Connection, dialect: Dialect, worker_id: str) -> None:
    """Write down that this process ends on its own."""
    connection.execute(
        sa.update(workers)
        .where(workers.c.worker_id == worker_id)
        .values(stopping=1, heartbeat_at=dialect.now)
    )


def submit(
    connection: sa.Connection,
    dialect: Dialect,
    new: Sequence[rows.NewRollout],
    records: dict[str, rows.Artifact],
) -> list[tuple[str, bool]]:
    """Insert the rollouts that do not exist yet; return (id, is new) for each, in order.

    Raises `errors.Conflict` when a key exists with another request.
    """
    at = now(connection, dialect)
    evidence.keep_tasks(connection, dialect, at, new, records)
    mine = {row.id for row in new}
    for part in _parts(new):
        connection.execute(
            dialect.insert_missing(rollouts),
            [_values(row, at) for row in part],
        )
    stored: dict[str, sa.Row[Any]] = {}
    for part in _parts(new):
        wanted = sa.select(rollouts.c.idem_key, rollouts.c.id, rollouts.c.request_sha256).where(
            rollouts.c.idem_key.in_([row.idem_key for row in part])
        )
        stored |= {row.idem_key: row for row in connection.execute(wanted)}
    for row in new:
        found = stored[row.idem_key]
        if found.request_sha256 != row.request_sha256:
            raise errors.Conflict(
                f"rollout {found.id} has this key already, for another request",
                hint="use a new run name or key for a changed task, model or configuration",
            )
    return [(str(stored[row.idem_key].id), stored[row.idem_key].id in mine) for row in new]


def _parts(new: Sequence[rows.NewRollout], size: int = 500) -> list[Sequence[rows.NewRollout]]:
    return [new[start : start + size] for start in range(0, len(new), size)]


def _values(row: rows.NewRollout, at: int) -> dict[str, Any]:
    names = {c.name for c in rollouts.columns}
    given = {name: getattr(row, name) for name in row.__slots__ if name in names}
    deadline = None if row.deadline_ms is None else at + row.deadline_ms
    return given | {"created_at": at, "updated_at": at, "deadline_at": deadline}


def claim(
    connection: sa.Connection,
    dialect: Dialect,
    worker: WorkerIdentity,
    *,
    fsm_version: int,
    ttl_ms: int,
    limit: int,
    run_id: str | None = None,
    ids: Sequence[str] | None = None,
    early: bool = False,
) -> list[rows.Lease]:
    """Take rollouts that nobody works on: not terminal, due (unless `early`), and without a live lease.

    Those of a later state machine than `fsm_version` are not for this program.

    An attempt that its owner never ended is closed as `crashed` and counted.
    """
    due = (
        sa.select(rollouts.c.id)
        .where(IS_LIVE, _unheld(dialect), rollouts.c.fsm_version <= fsm_version)
        .limit(limit)
    )
    if not early:
        due = due.where(rollouts.c.not_before <= dialect.now).order_by(rollouts.c.not_before, rollouts.c.id)
    if run_id is not None:
        due = due.where(rollouts.c.run_id == run_id)
    if ids is not None:
        due = due.where(rollouts.c.id.in_(ids))
    if dialect.name != "sqlite":
        due = due.with_for_update(skip_locked=True)
    taken = sorted(str(rollout_id) for rollout_id in connection.execute(due).scalars())
    return _take(connection, dialect, worker, taken, ttl_ms) if taken else []


def _unheld(dialect: Dialect) -> sa.ColumnElement[bool]:
    return sa.or_(rollouts.c.lease_until.is_(None), rollouts.c.lease_until < dialect.now)


_LAST = """SELECT item.i AS id, a.fence, a.attempt_no, a.outcome FROM {rows} JOIN attempts AS a
  ON a.rollout_id = item.i AND a.fence = (SELECT max(b.fence) FROM attempts AS b WHERE b.rollout_id = item.i)"""
_CRASHED = """UPDATE attempts SET ended_at = {now}, outcome = 'crashed' FROM {rows}
  WHERE attempts.rollout_id = item.i AND attempts.fence = item.f"""
_TAKE = """UPDATE rollouts SET fence = rollouts.fence + 1, lease_owner = :worker, lease_until = {now} + :ttl,
    attempts = item.n, crash_count = rollouts.crash_count + item.crash, updated_at = {now}
  FROM {rows} WHERE rollouts.id = item.i RETURNING id, fence, version, state, updated_at AS now"""
_BEGUN = """INSERT INTO attempts (rollout_id, fence, attempt_no, worker_id, code_version, claimed_at)
  SELECT item.i, item.f, item.n, :worker, :code, item.at FROM {rows}"""


def _take(
    connection: sa.Connection, dialect: Dialect, worker: WorkerIdentity, ids: list[str], ttl_ms: int
) -> list[rows.Lease]:
    """Claim these rollouts, all in a few statements: a claim holds up everybody else's writes."""

    def run(statement: str, columns: dict[str, type], items: list[dict[str, Any]], **more: object) -> Any:  # noqa: ANN401 - a result
        text = sa.text(statement.format(now=dialect.now_sql, rows=dialect.rows_of(columns)))
        return connection.execute(text, {"items": rows.canonical_json(items), **more})

    last = {row.id: row for row in run(_LAST, {"i": str}, [{"i": i} for i in ids]).fetchall()}
    number = {i: last[i].attempt_no + 1 if i in last else 1 for i in ids}
    crashed = {i for i in ids if i in last and last[i].outcome is None}
    if crashed:
        run(_CRASHED, {"i": str, "f": int}, [{"i": i, "f": last[i].fence} for i in sorted(crashed)])
    taking = [{"i": i, "n": number[i], "crash": int(i in crashed)} for i in ids]
    taken = run(
        _TAKE, {"i": str, "n": int, "crash": int}, taking, worker=worker.worker_id, ttl=ttl_ms
    ).fetchall()
    begun = [{"i": row.id, "f": row.fence, "n": number[row.id], "at": row.now} for row in taken]
    run(
        _BEGUN,
        {"i": str, "f": int, "n": int, "at": int},
        begun,
        worker=worker.worker_id,
        code=worker.code_version,
    )
    return [
        rows.Lease(
            rollout_id=row.id,
            fence=row.fence,
            attempt_no=number[row.id],
            version=row.version,
            state=row.state,
            previous="crashed" if row.id in crashed else (last[row.id].outcome if row.id in last else None),
        )
        for row in sorted(taken, key=lambda row: str(row.id))
    ]


_HELD = {"i": str, "f": int}
_RENEW = """UPDATE rollouts SET lease_until = {now} + :ttl FROM {rows}
  WHERE rollouts.id = item.i AND rollouts.fence = item.f AND rollouts.lease_owner = :worker
    AND rollouts.lease_until > {now}
  RETURNING {id} AS id, cancel_requested_at"""
_REACQUIRE = """UPDATE rollouts SET lease_until = {now} + :ttl FROM {rows}
  WHERE rollouts.id = item.i AND rollouts.fence = item.f AND rollouts.lease_owner = :worker
  RETURNING {id} AS id, cancel_requested_at"""


def renew(
    connection: sa.Connection,
    dialect: Dialect,
    worker_id: str,
    held: Sequence[tuple[str, int]],
    *,
    ttl_ms: int,
) -> dict[str, bool]:
    """Extend leases that have not run out; return id -> "a person asked to cancel it". Missing ids are not ours now."""
    return _extend(connection, dialect, _RENEW, worker_id, held, ttl_ms)


def note_alive(connection: sa.Connection, dialect: Dialect, worker_id: str) -> None:
    """Write down the worker's sign of life: after its leases, because every batch of writes ends with that row too."""
    connection.execute(
        sa.update(workers).where(workers.c.worker_id == worker_id).values(heartbeat_at=dialect.now)
    )


def reacquire(
    connection: sa.Connection,
    dialect: Dialect,
    worker_id: str,
    held: Sequence[tuple[str, int]],
    *,
    ttl_ms: int,
) -> dict[str, bool]:
    """Extend leases that ran out while nobody claimed: an unchanged fence and owner is the proof of that."""
    return _extend(connection, dialect, _REACQUIRE, worker_id, held, ttl_ms)


def _extend(
    connection: sa.Connection,
    dialect: Dialect,
    statement: str,
    worker_id: str,
    held: Sequence[tuple[str, int]],
    ttl_ms: int,
) -> dict[str, bool]:
    if not held:
        return {}
    items = rows.canonical_json([{"i": i, "f": f} for i, f in sorted(held)])
    if dialect.name != "sqlite":
        locked = f"SELECT r.id FROM {dialect.rows_of(_HELD)} JOIN rollouts r ON r.id = item.i ORDER BY r.id FOR UPDATE OF r"
        connection.execute(sa.text(locked), {"items": items})
    text = statement.format(
        now=dialect.now_sql,
        rows=dialect.rows_of(_HELD),
        id="id" if dialect.name == "sqlite" else "rollouts.id",
    )
    done = connection.execute(sa.text(text), {"items": items, "ttl": ttl_ms, "worker": worker_id}).fetchall()
    return {row.id: row.cancel_requested_at is not None for row in done}


def deliver(connection: sa.Connection, dialect: Dialect, given: rows.Delivery) -> None:
    """Write down what a caller is handed; the same delivery may be written again."""
    row = {name: getattr(given, name) for name in given.__slots__}
    row |= {"kind": given.kind, "exception": rows.storable(given.exception), "at": now(connection, dialect)}
    connection.execute(dialect.insert_missing(deliveries), row)


def request_cancel(connection: sa.Connection, dialect: Dialect, rollout_id: str) -> bool:
    """Ask the owner of a rollout to stop it; False when it is graded, over or unknown."""
    changed = connection.execute(
        sa.update(rollouts)
        .where(rollouts.c.id == rollout_id, IS_LIVE, rollouts.c.state != "graded")
        .values(cancel_requested_at=dialect.now)
        .returning(rollouts.c.id)
    ).fetchall()
    return bool(changed)


def record_validation(
    connection: sa.Connection, dialect: Dialect, row: rows.ValidationRow, record: rows.Artifact
) -> None:
    """Store one control run of a task."""
    at = now(connection, dialect)
    evidence.keep_tasks(connection, dialect, at, [row], {row.task_sha256: record})
    evidence.keep(connection, dialect, [row.test_map, row.log])
    run_no = connection.execute(
        sa.select(sa.func.coalesce(sa.func.max(validations.c.run_no), 0) + 1).where(
            validations.c.task_sha256 == row.task_sha256,
            validations.c.grader_digest == row.grader_digest,
            validations.c.patch == row.patch,
        )
    ).scalar_one()
    connection.execute(
        sa.insert(validations),
        {
            "task_sha256": row.task_sha256, "grader_digest": row.grader_digest, "run_no": run_no, "patch": row.patch,
            "outcome": row.outcome, "as_expected": int(row.as_expected), "reasons": row.reasons,
            "test_map": row.test_map.sha256, "log": row.log.sha256, "duration_s": row.duration_s, "at": at,
        },
    )  # fmt: skip


def now(connection: sa.Connection, dialect: Dialect) -> int:
    """Return the database's clock."""
    return int(connection.execute(sa.select(dialect.now)).scalar_one())
