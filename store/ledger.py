"""Closing rows of the sandbox ledger. Needs no lease: only the provider's proof moves a row, and only forward.

Sandboxes that belong to no rollout (control runs) have no lease either: the worker that declared them owns them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from store import rows
from store import workers as processes
from store.schema import LEDGER_OPEN, sandboxes, workers

if TYPE_CHECKING:
    from collections.abc import Callable

    from store.dialect import Dialect

_SILENT_MS = 600_000
"""A worker that cannot be looked at is believed gone after this long without a heartbeat, and past its deadline."""


def next_ordinal(connection: sa.Connection, rollout_id: str, fence: int) -> int:
    """Return the number that the next sandbox of this rollout and fence gets in its key."""
    found = connection.execute(
        sa.select(sa.func.count() + 1).where(sandboxes.c.rollout_id == rollout_id, sandboxes.c.fence == fence)
    ).scalar_one()
    return int(found)


def close(connection: sa.Connection, dialect: Dialect, key: str, proof: str) -> bool:
    """Mark a sandbox released with the provider's proof; False when it was closed before."""
    changed = connection.execute(
        sa.update(sandboxes)
        .where(sandboxes.c.key == key, sandboxes.c.status == "releasing")
        .values(status="released", released_at=dialect.now, proof=proof, last_error=None)
        .returning(sandboxes.c.key)
    ).fetchall()
    return bool(changed)


def note_failed_release(connection: sa.Connection, key: str, error: str) -> None:
    """Count a release that could not be proven; the row stays `releasing`."""
    connection.execute(
        sa.update(sandboxes)
        .where(sandboxes.c.key == key, sandboxes.c.status == "releasing")
        .values(release_attempts=sandboxes.c.release_attempts + 1, last_error=rows.storable(error))
    )


def declare(connection: sa.Connection, dialect: Dialect, row: rows.SandboxIntent) -> None:
    """Write down a sandbox of no rollout that is about to be made."""
    connection.execute(
        sa.insert(sandboxes).values(
            key=row.key,
            fence=0,
            role=row.role,
            provider=row.provider,
            provider_ref=row.provider_ref,
            env_name=row.env_name,
            status="intent",
            ttl_s=row.ttl_s,
            intent_at=dialect.now,
            create_deadline=dialect.now + round(row.create_timeout_s * 1000),
        )
    )


def note_live(connection: sa.Connection, dialect: Dialect, row: rows.SandboxLive) -> None:
    """Write down that a declared sandbox of no rollout was made."""
    connection.execute(
        sa.update(sandboxes)
        .where(*_declared(row.key), sandboxes.c.status == "intent")
        .values(
            status="live",
            provider_ids=row.provider_ids,
            isolation=row.isolation,
            live_at=dialect.now,
            expires_at=dialect.now + sandboxes.c.ttl_s * 1000,
        )
    )


def give_up(connection: sa.Connection, dialect: Dialect, key: str) -> None:
    """Mark a sandbox of no rollout as to be released, however far it came."""
    connection.execute(
        sa.update(sandboxes)
        .where(*_declared(key), sandboxes.c.status.in_(("intent", "live")))
        .values(status="releasing", release_requested_at=dialect.now)
    )


def _declared(key: str) -> tuple[sa.ColumnElement[bool], ...]:
    return (sandboxes.c.key == key, sandboxes.c.rollout_id.is_(None))


def give_up_abandoned(
    connection: sa.Connection,
    dialect: Dialect,
    here: processes.WorkerIdentity,
    owner_of: Callable[[str], str | None],
) -> list[tuple[str, str]]:
    """Mark every open sandbox of no rollout whose worker is gone as to be released; return (key, authority) of each.

    `owner_of` tells a key's worker id. A worker that may still live keeps its own.
    """
    now = int(connection.execute(sa.select(dialect.now)).scalar_one())
    found = connection.execute(
        sa.select(sandboxes)
        .where(sandboxes.c.rollout_id.is_(None), sandboxes.c.status.in_(LEDGER_OPEN))
        .order_by(sandboxes.c.key)
    ).fetchall()
    owners = {row.key: owner_of(row.key) for row in found}
    known = {
        worker.worker_id: worker
        for worker in connection.execute(
            sa.select(workers).where(workers.c.worker_id.in_({owner for owner in owners.values() if owner}))
        )
    }
    gone = [row for row in found if _is_abandoned(row, known.get(owners[row.key] or ""), here, now)]
    for row in gone:
        give_up(connection, dialect, row.key)
    return [(row.key, row.provider_ref) for row in gone]


def _is_abandoned(
    row: sa.Row[Any], worker: sa.Row[Any] | None, here: processes.WorkerIdentity, now: int
) -> bool:
    overdue = bool((row.expires_at or row.create_deadline) < now)
    if worker is None:
        return overdue
    if worker.stopping:
        return True
    runs = processes.runs(worker, here)
    if runs is None:
        return overdue and bool(worker.heartbeat_at < now - _SILENT_MS)
    return not runs
