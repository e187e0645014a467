"""Closing rows of the sandbox ledger. Needs no lease: only the provider's proof moves a row, and only forward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import sqlalchemy as sa

from store.schema import sandboxes

if TYPE_CHECKING:
    from collections.abc import Sequence


def next_ordinal(connection: sa.Connection, rollout_id: str, fence: int) -> int:
    """Return the number that the next sandbox of this rollout and fence gets in its key."""
    found = connection.execute(
        sa.select(sa.func.count() + 1).where(sandboxes.c.rollout_id == rollout_id, sandboxes.c.fence == fence)
    ).scalar_one()
    return int(found)


def close(connection: sa.Connection, now: sa.ColumnElement[int], key: str, proof: str) -> bool:
    """Mark a sandbox released with the provider's proof; False when it was closed before."""
    changed = connection.execute(
        sa.update(sandboxes)
        .where(sandboxes.c.key == key, sandboxes.c.status == "releasing")
        .values(status="released", released_at=now, proof=proof, last_error=None)
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


def open_of(connection: sa.Connection, rollout_ids: Sequence[str]) -> list[str]:
    """Return the keys of open ledger rows of these rollouts."""
    return list(
        connection.execute(
            sa.select(sandboxes.c.key).where(
                sandboxes.c.rollout_id.in_(rollout_ids),
                sandboxes.c.status.in_(("intent", "live", "releasing")),
            )
        ).scalars()
    )
