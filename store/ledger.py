"""Closing rows of the sandbox ledger. Needs no lease: only the provider's proof moves a row, and only forward.

Sandboxes that belong to no rollout (control runs) have no lease either: the worker that declared them owns them.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import sqlalchemy as sa

from store import rows
from store.schema import sandboxes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from store.dialect import Dialect


def next_ordinal(connection: sa.Connection, rollout_id: str, fence: int) -> int:
    """Return the number that the next sandbox of this rollout and fence gets in its key."""
    found = connection.execute(
        sa.select(sa.func.count() + 1).where(sandboxes.c.rollout_id == rollout_id, sandboxes.c.fence == fence)
    ).scalar_one()
    return int(found)


def close(
    connection: sa.Connection, dialect: Dialect, key: str, proof: str, status: str = "released"
) -> bool:
    """Mark a sandbox released with the provider's proof, or lost when nothing was ever made; False when it was closed."""
    changed = dialect.run(
        connection, _close(dialect), {"key": key, "status": status, "proof": rows.storable(proof)}
    )
    return bool(changed)


@cache
def _close(dialect: Dialect) -> str:
    """Return the statement, made once: every sandbox there ever was is closed by it."""
    return dialect.driver_sql(
        f"UPDATE sandboxes SET status = :status, released_at = {dialect.now_sql}, proof = :proof, last_error = NULL"
        " WHERE key = :key AND status = 'releasing' RETURNING key"
    )


def note_failed_release(connection: sa.Connection, key: str, error: str, found: Sequence[str] = ()) -> None:
    """Count a release that could not be proven; the row stays `releasing`.

    `found` are the provider's ids of what was there, so that nobody says later that nothing was ever made.
    """
    connection.execute(
        sa.update(sandboxes)
        .where(sandboxes.c.key == key, sandboxes.c.status == "releasing")
        .values(
            release_attempts=sandboxes.c.release_attempts + 1,
            last_error=rows.storable(error),
            **({"provider_ids": list(found)} if found else {}),
        )
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
