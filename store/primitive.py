"""The one way a rollout changes: compare-and-set on version, fence, lease and edge, with its log row and evidence.

Every function runs inside a transaction that began IMMEDIATE; a refusal is a value and writes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from store import errors, evidence, rows
from store.schema import LEDGER_OPEN, TERMINAL, attempts, fsm_edges, rollouts, sandboxes, transitions

if TYPE_CHECKING:
    from collections.abc import Sequence

_COUNTERS = {
    "crash": rollouts.c.crash_count,
    "infra": rollouts.c.infra_count,
    "grade": rollouts.c.grade_count,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """One transition to make, with everything that rides on it."""

    lease: rows.Lease
    trigger: str
    payload: dict[str, Any]
    extra: Sequence[rows.Row]
    op_id: str
    """The same for every try of one write, so that a lost acknowledgement is recognised."""
    actor: str
    cancellable: bool
    give_back: rows.GiveBack | None
    failure_class: str | None = None
    failure_msg: str | None = None


def transition(connection: sa.Connection, now: sa.ColumnElement[int], move: Move) -> rows.Outcome:
    """Make one move, or say why not. Raises `errors.IllegalTransition` when the edge does not exist."""
    lease = move.lease
    row = _row(connection, now, lease.rollout_id)
    refusal = _classify(connection, row, lease, move)
    if refusal is not None:
        return refusal
    dst = connection.execute(
        sa.select(fsm_edges.c.dst).where(fsm_edges.c.src == row.state, fsm_edges.c.trig == move.trigger)
    ).scalar()
    if dst is None:
        raise errors.IllegalTransition(
            f"rollout {lease.rollout_id} is {row.state}: no edge {move.trigger!r} from there"
        )
    terminal = dst in TERMINAL
    evidence.apply_all(connection, row.now, lease, move.extra)
    _check_ledger(connection, lease, dst)
    connection.execute(
        sa.insert(transitions),
        {
            "rollout_id": lease.rollout_id, "seq": row.version + 1, "src": row.state, "trig": move.trigger, "dst": dst,
            "fence": lease.fence, "actor": move.actor, "op_id": move.op_id, "at": row.now, "payload": move.payload,
        },
    )  # fmt: skip
    changes: dict[str, Any] = {"state": dst, "version": row.version + 1, "updated_at": row.now}
    if terminal:
        changes |= {
            "finished_at": row.now,
            "failure_class": move.failure_class,
            "failure_msg": move.failure_msg,
        }
    give_back = move.give_back or (
        rows.GiveBack(outcome="done" if dst == "released" else "failed") if terminal else None
    )
    if give_back is not None:
        changes |= _end_attempt(connection, row, lease, give_back)
    _update(connection, lease, changes)
    return rows.Applied(version=row.version + 1, state=dst)


def record(
    connection: sa.Connection,
    now: sa.ColumnElement[int],
    lease: rows.Lease,
    extra: Sequence[rows.Row],
    *,
    spend: str | None = None,
    give_back: rows.GiveBack | None = None,
) -> rows.Outcome:
    """Store evidence without a state change, under the same fence and lease; may spend a budget or end the attempt."""
    row = _row(connection, now, lease.rollout_id)
    refusal = _classify(connection, row, lease, None)
    if refusal is not None:
        return refusal
    evidence.apply_all(connection, row.now, lease, extra)
    changes: dict[str, Any] = {}
    if spend is not None:
        changes[_COUNTERS[spend].name] = _COUNTERS[spend] + 1
    if give_back is not None:
        changes |= _end_attempt(connection, row, lease, give_back)
    if changes:
        _update(connection, lease, changes | {"updated_at": row.now})
    return rows.Applied(version=row.version, state=row.state)


def _row(connection: sa.Connection, now: sa.ColumnElement[int], rollout_id: str) -> sa.Row[Any]:
    row = connection.execute(
        sa.select(
            rollouts.c.state, rollouts.c.version, rollouts.c.fence, rollouts.c.lease_until,
            rollouts.c.cancel_requested_at, now.label("now"),
        ).where(rollouts.c.id == rollout_id)
    ).first()  # fmt: skip
    if row is None:
        raise errors.Conflict(f"there is no rollout {rollout_id}", hint="see `rollouts list`")
    return row


def _classify(
    connection: sa.Connection, row: sa.Row[Any], lease: rows.Lease, move: Move | None
) -> rows.Outcome | None:
    if row.fence > lease.fence:
        return rows.LeaseLost(fence=row.fence)
    if move is not None and row.version != lease.version:
        done = connection.execute(
            sa.select(transitions.c.op_id).where(
                transitions.c.rollout_id == lease.rollout_id, transitions.c.seq == lease.version + 1
            )
        ).scalar()
        if done == move.op_id:
            return rows.AlreadyApplied(version=row.version, state=row.state)
    if row.state in TERMINAL:
        return rows.Terminal(state=row.state)
    if row.lease_until is None or row.lease_until <= row.now:
        return rows.LeaseExpired()
    if move is not None and row.version != lease.version:
        return rows.VersionConflict(version=row.version, state=row.state)
    if move is not None and move.cancellable and row.cancel_requested_at is not None:
        return rows.Cancelled()
    return None


def _check_ledger(connection: sa.Connection, lease: rows.Lease, dst: str) -> None:
    if dst != "released":
        return
    left = connection.execute(
        sa.select(sandboxes.c.key).where(
            sandboxes.c.rollout_id == lease.rollout_id, sandboxes.c.status.in_(LEDGER_OPEN)
        )
    ).scalars()
    still_open = list(left)
    if still_open:
        raise errors.Conflict(f"rollout {lease.rollout_id} still owns sandboxes: {', '.join(still_open)}")


def _end_attempt(
    connection: sa.Connection, row: sa.Row[Any], lease: rows.Lease, give_back: rows.GiveBack
) -> dict[str, Any]:
    connection.execute(
        sa.update(attempts)
        .where(attempts.c.rollout_id == lease.rollout_id, attempts.c.fence == lease.fence)
        .values(
            ended_at=row.now,
            outcome=give_back.outcome,
            error_class=give_back.error_class,
            error=give_back.error,
        )
    )
    changes: dict[str, Any] = {
        "lease_owner": None,
        "lease_until": None,
        "not_before": row.now + give_back.delay_ms,
    }
    if give_back.spend is not None:
        changes[_COUNTERS[give_back.spend].name] = _COUNTERS[give_back.spend] + 1
    return changes


def _update(connection: sa.Connection, lease: rows.Lease, changes: dict[str, Any]) -> None:
    updated = connection.execute(
        sa.update(rollouts)
        .where(rollouts.c.id == lease.rollout_id, rollouts.c.fence == lease.fence)
        .values(**changes)
        .returning(rollouts.c.id)
    ).fetchall()
    if len(updated) != 1:
        raise errors.Conflict(f"rollout {lease.rollout_id} changed inside its own transaction")
