"""What workers left that are gone: leases that nobody renews, sandboxes that nobody will release.

Every sweep asks the row again in its own WHERE, so that it is harmless beside another one or a worker that comes back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from store import rows
from store import workers as processes
from store.schema import IS_LIVE, LEDGER_OPEN, TERMINAL, rollouts, sandboxes, workers

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from store.dialect import Dialect

_SILENT_MS = 600_000
"""A worker that cannot be looked at is believed gone after this long without a heartbeat, and past its deadline."""


def _within(column: sa.Column[Any], ids: Collection[str] | None) -> sa.ColumnElement[bool]:
    return sa.true() if ids is None else column.in_(ids)


def take_from_dead(
    connection: sa.Connection,
    dialect: Dialect,
    here: processes.WorkerIdentity,
    ids: Collection[str] | None = None,
) -> list[str]:
    """End the leases of workers of this machine that are provably dead; return the rollouts, free to be claimed.

    With `ids`, only of these rollouts.
    """
    owners = connection.execute(
        sa.select(workers)
        .where(workers.c.host == here.host)
        .where(
            workers.c.worker_id.in_(
                sa.select(rollouts.c.lease_owner).where(IS_LIVE, rollouts.c.lease_until > dialect.now)
            )
        )
    ).fetchall()
    dead = [
        row.worker_id for row in owners if processes.runs(processes.Recorded.of(row._mapping), here) is False
    ]
    if not dead:
        return []
    freed = connection.execute(
        sa.update(rollouts)
        .where(IS_LIVE, rollouts.c.lease_owner.in_(dead), rollouts.c.lease_until >= dialect.now)
        .where(_within(rollouts.c.id, ids))
        .values(lease_until=dialect.now - 1)
        .returning(rollouts.c.id)
    )
    return sorted(str(row.id) for row in freed.fetchall())


def give_up_ownerless(
    connection: sa.Connection, dialect: Dialect, ids: Collection[str] | None = None
) -> list[str]:
    """Mark every sandbox of a rollout that is over or that nobody holds as to be released; return their keys.

    A later owner of such a rollout starts a new attempt. With `ids`, only of these rollouts.
    """
    held = sa.select(rollouts.c.id).where(IS_LIVE, rollouts.c.lease_until > dialect.now)
    given_up = connection.execute(
        sa.update(sandboxes)
        .where(
            sandboxes.c.status.in_(("intent", "live")),
            sandboxes.c.rollout_id.is_not(None),
            sandboxes.c.rollout_id.not_in(held),
            _within(sandboxes.c.rollout_id, ids),
        )
        .values(status="releasing", release_requested_at=dialect.now)
        .returning(sandboxes.c.key)
    )
    return sorted(str(row.key) for row in given_up.fetchall())


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
    connection.execute(
        sa.update(sandboxes)
        .where(sandboxes.c.key.in_([row.key for row in gone]), sandboxes.c.status.in_(("intent", "live")))
        .values(status="releasing", release_requested_at=dialect.now)
    )
    return [(row.key, row.provider_ref) for row in gone]


def _is_abandoned(
    row: sa.Row[Any], worker: sa.Row[Any] | None, here: processes.WorkerIdentity, now: int
) -> bool:
    overdue = bool((row.expires_at or row.create_deadline) < now)
    if worker is None:
        return overdue
    if worker.stopping:
        return True
    runs = processes.runs(processes.Recorded.of(worker._mapping), here)
    if runs is None:
        return overdue and bool(worker.heartbeat_at < now - _SILENT_MS)
    return not runs


_WRITTEN_OFF = "written off "


def written_off() -> sa.Select[Any]:
    """Return the query of the authorities whose newest sandbox was written off: nobody expects an answer of them."""
    later = sandboxes.alias()
    newer = sa.exists().where(
        later.c.provider_ref == sandboxes.c.provider_ref, later.c.intent_at > sandboxes.c.intent_at
    )
    return (
        sa.select(sandboxes.c.provider_ref)
        .where(sandboxes.c.status == "lost", sandboxes.c.proof.startswith(_WRITTEN_OFF), ~newer)
        .distinct()
    )


def write_off(connection: sa.Connection, dialect: Dialect, ref: str, why: str) -> list[str]:
    """Mark the open sandboxes of an authority that will never answer as lost, past their expiry; return their keys.

    Those of a rollout that somebody holds stay.
    """
    held = sa.select(rollouts.c.id).where(
        rollouts.c.state.not_in(TERMINAL), rollouts.c.lease_until > dialect.now
    )
    lost = connection.execute(
        sa.update(sandboxes)
        .where(
            sandboxes.c.provider_ref == ref,
            sandboxes.c.status.in_(LEDGER_OPEN),
            sa.func.coalesce(sandboxes.c.expires_at, sandboxes.c.create_deadline + sandboxes.c.ttl_s * 1000)
            < dialect.now,
            sa.or_(sandboxes.c.rollout_id.is_(None), sandboxes.c.rollout_id.not_in(held)),
        )
        .values(
            status="lost", released_at=dialect.now, proof=_WRITTEN_OFF + rows.storable(why), last_error=None
        )
        .returning(sandboxes.c.key)
    )
    return sorted(str(row.key) for row in lost.fetchall())


def open_sandboxes(dialect: Dialect) -> sa.Select[Any]:
    """Return the query of every open ledger row, oldest first, with `held` (somebody's live lease) and `may_appear`.

    A sandbox may appear when its create call was cut off and its time is not over.
    """
    held = sa.exists().where(
        rollouts.c.id == sandboxes.c.rollout_id, IS_LIVE, rollouts.c.lease_until > dialect.now
    )
    return (
        sa.select(
            sandboxes,
            sa.case((held, 1), else_=0).label("held"),
            sa.select(rollouts.c.lease_owner)
            .where(rollouts.c.id == sandboxes.c.rollout_id)
            .scalar_subquery()
            .label("lease_owner"),
            sa.case(
                (sa.and_(sandboxes.c.live_at.is_(None), sandboxes.c.create_deadline > dialect.now), 1),
                else_=0,
            ).label("may_appear"),
        )
        .where(sandboxes.c.status.in_(LEDGER_OPEN))
        .order_by(sandboxes.c.intent_at, sandboxes.c.key)
    )


def unfinished(dialect: Dialect) -> sa.Select[Any]:
    """Return the query of every rollout that is not over, oldest first, with `held`, `due_in_ms` and its worker's row."""
    return (
        sa.select(
            rollouts,
            sa.case((rollouts.c.lease_until > dialect.now, 1), else_=0).label("held"),
            (rollouts.c.not_before - dialect.now).label("due_in_ms"),
        )
        .where(IS_LIVE)
        .order_by(rollouts.c.created_at, rollouts.c.id)
    )
