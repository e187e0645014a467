"""Closing rows of the sandbox ledger. Needs no lease: only the provider's proof moves a row, and only forward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import sqlalchemy as sa

from store.schema import sandboxes

if TYPE_CHECKING:
    from store.dialect import Dialect


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
        .values(release_attempts=sandboxes.c.release_attempts + 1, last_error=error)
    )
