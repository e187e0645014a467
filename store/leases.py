"""Who may work on what: submit, claim, renew. A claim raises the fence, so whoever held the rollout before is shut out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from store import errors, evidence, rows
from store.schema import TERMINAL, attempts, rollouts, validations, workers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from store.workers import WorkerIdentity

Now = sa.ColumnElement[int]


def register(connection: sa.Connection, now: Now, worker: WorkerIdentity) -> None:
    """Write down this process before it claims anything."""
    at = _now(connection, now)
    connection.execute(
        sa.insert(workers),
        {
            "worker_id": worker.worker_id, "host": worker.host, "boot_id": worker.boot_id, "pid_ns": worker.pid_ns,
            "pid": worker.pid, "pid_started": worker.pid_started, "code_version": worker.code_version,
            "started_at": at, "heartbeat_at": at,
        },
    )  # fmt: skip


def stop(connection: sa.Connection, now: Now, worker_id: str) -> None:
    """Write down that this process ends on its own."""
    connection.execute(
        sa.update(workers)
        .where(workers.c.worker_id == worker_id)
        .values(stopping=1, heartbeat_at=_now(connection, now))
    )


def submit(
    connection: sa.Connection, now: Now, new: Sequence[rows.NewRollout], records: dict[str, rows.Artifact]
) -> list[tuple[str, bool]]:
    """Insert the rollouts that do not exist yet; return (id, is new) for each, in order.

    Raises `errors.Conflict` when a key exists with another request.
    """
    at = _now(connection, now)
    answer = []
    for row in new:
        found = connection.execute(
            sa.select(rollouts.c.id, rollouts.c.request_sha256).where(rollouts.c.idem_key == row.idem_key)
        ).first()
        if found is not None:
            if found.request_sha256 != row.request_sha256:
                raise errors.Conflict(
                    f"rollout {found.id} has this key already, for another request",
                    hint="use a new run name or key for a changed task, model or configuration",
                )
            answer.append((str(found.id), False))
            continue
        evidence.keep_task(connection, at, row, records[row.task_sha256])
        connection.execute(sa.insert(rollouts), _values(row) | {"created_at": at, "updated_at": at})
        answer.append((row.id, True))
    return answer


def _values(row: rows.NewRollout) -> dict[str, Any]:
    names = [c.name for c in rollouts.columns]
    return {name: getattr(row, name) for name in row.__slots__ if name in names}


def claim(
    connection: sa.Connection,
    now: Now,
    worker: WorkerIdentity,
    *,
    ttl_ms: int,
    limit: int,
    run_id: str | None = None,
    ids: Sequence[str] | None = None,
) -> list[rows.Lease]:
    """Take rollouts that nobody works on: not terminal, due, and without a live lease.

    An attempt that its owner never ended is closed as `crashed` and counted.
    """
    at = _now(connection, now)
    wanted = [
        rollouts.c.state.not_in(TERMINAL),
        rollouts.c.not_before <= at,
        sa.or_(rollouts.c.lease_until.is_(None), rollouts.c.lease_until < at),
    ]
    if run_id is not None:
        wanted.append(rollouts.c.run_id == run_id)
    if ids is not None:
        wanted.append(rollouts.c.id.in_(ids))
    due = connection.execute(
        sa.select(rollouts.c.id).where(*wanted).order_by(rollouts.c.not_before, rollouts.c.id).limit(limit)
    ).scalars()
    return [_take(connection, at, worker, rollout_id, ttl_ms) for rollout_id in list(due)]


def _take(
    connection: sa.Connection, at: int, worker: WorkerIdentity, rollout_id: str, ttl_ms: int
) -> rows.Lease:
    last = connection.execute(
        sa.select(attempts.c.fence, attempts.c.attempt_no, attempts.c.outcome)
        .where(attempts.c.rollout_id == rollout_id)
        .order_by(attempts.c.fence.desc())
        .limit(1)
    ).first()
    crashed = last is not None and last.outcome is None
    if last is not None and crashed:
        connection.execute(
            sa.update(attempts)
            .where(attempts.c.rollout_id == rollout_id, attempts.c.fence == last.fence)
            .values(ended_at=at, outcome="crashed")
        )
    attempt_no = 1 if last is None else last.attempt_no + 1
    taken = connection.execute(
        sa.update(rollouts)
        .where(rollouts.c.id == rollout_id)
        .values(
            fence=rollouts.c.fence + 1,
            lease_owner=worker.worker_id,
            lease_until=at + ttl_ms,
            attempts=attempt_no,
            crash_count=rollouts.c.crash_count + int(crashed),
            updated_at=at,
        )
        .returning(rollouts.c.fence, rollouts.c.version, rollouts.c.state)
    ).fetchall()
    (row,) = taken
    connection.execute(
        sa.insert(attempts),
        {
            "rollout_id": rollout_id, "fence": row.fence, "attempt_no": attempt_no, "worker_id": worker.worker_id,
            "code_version": worker.code_version, "claimed_at": at,
        },
    )  # fmt: skip
    previous = "crashed" if crashed else (None if last is None else str(last.outcome))
    return rows.Lease(
        rollout_id=rollout_id,
        fence=row.fence,
        attempt_no=attempt_no,
        version=row.version,
        state=row.state,
        previous=previous,
    )


def heartbeat(
    connection: sa.Connection, now: Now, worker_id: str, held: Sequence[tuple[str, int]], *, ttl_ms: int
) -> dict[str, bool]:
    """Renew the leases that are still ours; return id -> "a person asked to cancel it". Missing ids are lost."""
    at = _now(connection, now)
    connection.execute(sa.update(workers).where(workers.c.worker_id == worker_id).values(heartbeat_at=at))
    kept: dict[str, bool] = {}
    for rollout_id, fence in held:
        renewed = connection.execute(
            sa.update(rollouts)
            .where(
                rollouts.c.id == rollout_id,
                rollouts.c.fence == fence,
                rollouts.c.lease_owner == worker_id,
                rollouts.c.lease_until > at,
            )
            .values(lease_until=at + ttl_ms)
            .returning(rollouts.c.cancel_requested_at)
        ).fetchall()
        if renewed:
            kept[rollout_id] = renewed[0].cancel_requested_at is not None
    return kept


def record_validation(
    connection: sa.Connection, now: Now, row: rows.ValidationRow, record: rows.Artifact
) -> None:
    """Store one control run of a task."""
    at = _now(connection, now)
    evidence.keep_task(connection, at, row, record)
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
            "test_map": evidence.keep(connection, row.test_map), "log": evidence.keep(connection, row.log),
            "duration_s": row.duration_s, "at": at,
        },
    )  # fmt: skip


def _now(connection: sa.Connection, now: Now) -> int:
    return int(connection.execute(sa.select(now)).scalar_one())
