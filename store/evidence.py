"""How each kind of fact becomes rows. Called only for changes whose guard held, inside the same transaction."""

from __future__ import annotations

import hashlib
from functools import singledispatch
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from store import errors, rows
from store.schema import (
    LEDGER_OPEN,
    artifacts,
    attempts,
    grades,
    llm_calls,
    patches,
    rewards,
    sandboxes,
    steps,
    tasks,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from store.dialect import Dialect

Made = tuple[str, dict[str, Any]]
"""Name of a statement below and one row of its parameters."""


def apply_all(
    connection: sa.Connection, dialect: Dialect, facts: Sequence[tuple[rows.Lease, int, Sequence[rows.Row]]]
) -> None:
    """Store every fact of (lease, time, facts), each kind in one statement.

    Raises `errors.Conflict` when a sandbox was not waiting for its create call, or for a second, different reward.
    """
    groups: dict[str, list[dict[str, Any]]] = {name: [] for name in _ORDER}
    for lease, now, extra in facts:
        for row in extra:
            for name, parameters in _made(row, now, lease):
                groups[name].append(
                    {
                        key: rows.storable(value) if type(value) is str else value
                        for key, value in parameters.items()
                    }
                )
    for name, many in groups.items():
        if not many:
            continue
        once = {"artifact": artifacts, "reward": rewards}.get(name)
        statement = _STATEMENTS[name] if once is None else dialect.insert_missing(once)
        done = connection.execute(statement, many)
        if name == "live" and done.rowcount != len(many):
            raise errors.Conflict("a sandbox was not waiting for its create call")
        if name == "reward" and done.rowcount != len(many):
            _check_rewards(connection, many)


def _check_rewards(connection: sa.Connection, given: list[dict[str, Any]]) -> None:
    """Raise `errors.Conflict` unless the rewards that were there already are the given ones."""
    what = ("grade_id", "reward", "stats_sha256")
    wanted = {row["rollout_id"]: tuple(row[name] for name in what) for row in given}
    stored = connection.execute(
        sa.select(rewards.c.rollout_id, *(rewards.c[name] for name in what)).where(
            rewards.c.rollout_id.in_(list(wanted))
        )
    )
    for rollout_id, *found in stored:
        if tuple(found) != wanted[rollout_id]:
            raise errors.Conflict(
                f"rollout {rollout_id} has another reward already", hint="a recorded reward never changes"
            )


def keep(connection: sa.Connection, dialect: Dialect, kept: Iterable[rows.Artifact]) -> None:
    """Store artifacts unless they are there."""
    many = [_artifact(artifact)[1] for artifact in kept]
    if many:
        connection.execute(dialect.insert_missing(artifacts), many)


def keep_tasks(
    connection: sa.Connection,
    dialect: Dialect,
    now: int,
    new: Sequence[rows.NewRollout | rows.ValidationRow],
    records: dict[str, rows.Artifact],
) -> None:
    """Store task records unless they are there; `records` maps a task's digest to its JSON."""
    distinct = {row.task_sha256: row for row in new}
    keep(connection, dialect, [records[digest] for digest in distinct])
    if distinct:
        connection.execute(
            dialect.insert_missing(tasks),
            [
                {
                    "task_sha256": row.task_sha256, "instance_id": row.instance_id,
                    "dataset_kind": row.dataset_kind, "eval_sha256": row.eval_sha256,
                    "record": records[row.task_sha256].sha256, "created_at": now,
                }
                for row in distinct.values()
            ],
        )  # fmt: skip


def _next(table: sa.Table, column: sa.Column[int], *more: sa.ColumnElement[bool]) -> sa.ScalarSelect[int]:
    """Return the expression that numbers a new row within its rollout (and what `more` says)."""
    return (
        sa.select(sa.func.coalesce(sa.func.max(column), 0) + 1)
        .where(table.c.rollout_id == sa.bindparam("of"), *more)
        .scalar_subquery()
    )


_OF_FENCE: sa.BindParameter[int] = sa.bindparam("under")
_STATEMENTS: dict[str, sa.Executable] = {
    "asked": sa.update(attempts)
    .where(
        attempts.c.rollout_id == sa.bindparam("of"),
        attempts.c.fence == _OF_FENCE,
        attempts.c.asked_at.is_(None),
    )
    .values(asked_at=sa.bindparam("now")),
    "step": sa.insert(steps),
    "llm_call": sa.insert(llm_calls).values(
        call_no=_next(llm_calls, llm_calls.c.call_no, llm_calls.c.fence == _OF_FENCE),
        source_seq=_next(llm_calls, llm_calls.c.call_no, llm_calls.c.fence == _OF_FENCE),
    ),
    "patch": sa.insert(patches).values(n=_next(patches, patches.c.n, patches.c.fence == _OF_FENCE)),
    "grade": sa.insert(grades).values(
        run_no=_next(
            grades,
            grades.c.run_no,
            grades.c.patch_sha256 == sa.bindparam("of_patch"),
            grades.c.grader_digest == sa.bindparam("of_grader"),
        )
    ),
    "intent": sa.insert(sandboxes),
    "live": sa.update(sandboxes)
    .where(
        sandboxes.c.key == sa.bindparam("of_key"),
        sandboxes.c.rollout_id == sa.bindparam("of"),
        sandboxes.c.fence == _OF_FENCE,
        sandboxes.c.status == "intent",
    )
    .values(
        status="live",
        provider_ids=sa.bindparam("ids"),
        isolation=sa.bindparam("how"),
        live_at=sa.bindparam("now"),
        expires_at=sa.bindparam("now") + sandboxes.c.ttl_s * 1000,
    ),
    "releasing": sa.update(sandboxes)
    .where(
        sandboxes.c.rollout_id == sa.bindparam("of"),
        sandboxes.c.status.in_(("intent", "live")),
        sa.or_(sa.bindparam("every", type_=sa.Integer) == 1, sandboxes.c.key == sa.bindparam("of_key")),
        sandboxes.c.key != sa.bindparam("but"),
    )
    .values(status="releasing", release_requested_at=sa.bindparam("now")),
}
_ORDER = ("asked", "artifact", "step", "llm_call", "patch", "grade", "reward", "intent", "live", "releasing")
assert set(_ORDER) == {"artifact", "reward", *_STATEMENTS}  # noqa: S101 - the two that may be there already
assert set(LEDGER_OPEN) == {"intent", "live", "releasing"}  # noqa: S101 - `releasing` above names the other two


@singledispatch
def _made(row: object, _now: int, _lease: rows.Lease) -> list[Made]:
    raise TypeError(f"the store knows no row of type {type(row).__name__}")


def _artifact(artifact: rows.Artifact) -> Made:
    return (
        "artifact",
        {"sha256": artifact.sha256, "codec": artifact.codec, "size": artifact.size, "bytes": artifact.stored},
    )


def _whose(lease: rows.Lease) -> dict[str, Any]:
    return {"rollout_id": lease.rollout_id, "fence": lease.fence}


def _numbered(lease: rows.Lease) -> dict[str, Any]:
    return {"of": lease.rollout_id, "under": lease.fence}


@_made.register
def _(_row: rows.Asked, now: int, lease: rows.Lease) -> list[Made]:
    return [("asked", _numbered(lease) | {"now": now})]


@_made.register
def _(row: rows.StepRow, now: int, lease: rows.Lease) -> list[Made]:
    output = rows.canonical_json(row.output)
    return [
        (
            "step",
            _whose(lease)
            | {
                "attempt_no": lease.attempt_no, "name": row.name, "output": output,
                "output_sha256": hashlib.sha256(output.encode()).hexdigest(), "tool_calls": row.tool_calls,
                "format_errors": row.format_errors, "command_timeouts": row.command_timeouts,
                "truncated_observations": row.truncated_observations, "tool_ms": row.tool_ms, "at": now,
            },
        )
    ]  # fmt: skip


@_made.register
def _(row: rows.LlmCallRow, now: int, lease: rows.Lease) -> list[Made]:
    call = {name: getattr(row, name) for name in row.__slots__}
    return [("llm_call", call | _whose(lease) | _numbered(lease) | {"at": now})]


@_made.register
def _(row: rows.PatchRow, now: int, lease: rows.Lease) -> list[Made]:
    patch = {
        "sha256": row.artifact.sha256, "artifact": row.artifact.sha256, "size": row.artifact.size,
        "base_commit": row.base_commit, "exit_reason": row.exit_reason, "exit_message": row.exit_message,
        "files": len(row.paths), "insertions": row.insertions, "deletions": row.deletions, "paths": row.paths,
        "notes": row.notes, "at": now,
    }  # fmt: skip
    return [_artifact(row.artifact), ("patch", patch | _whose(lease) | _numbered(lease))]


@_made.register
def _(row: rows.GradeRow, now: int, lease: rows.Lease) -> list[Made]:
    grade = {name: getattr(row, name) for name in row.__slots__}
    grade |= {
        "test_map": row.test_map.sha256, "log": row.log.sha256, "verdict": int(row.verdict),
        "mask_sample": int(row.mask_sample), "ended_at": now, "of": lease.rollout_id,
        "of_patch": row.patch_sha256, "of_grader": row.grader_digest,
    }  # fmt: skip
    return [_artifact(row.test_map), _artifact(row.log), ("grade", grade | _whose(lease))]


@_made.register
def _(row: rows.RewardRow, now: int, lease: rows.Lease) -> list[Made]:
    stats = rows.canonical_json(row.stats)
    reward = {
        "rollout_id": lease.rollout_id, "grade_id": row.grade_id, "reward": row.reward,
        "valid": int(row.reward is not None), "invalid_reason": row.invalid_reason,
        "reward_fn_version": row.reward_fn_version, "outcome_table": row.outcome_table, "stats": stats,
        "stats_sha256": hashlib.sha256(stats.encode()).hexdigest(), "at": now,
    }  # fmt: skip
    return [("reward", reward)]


@_made.register
def _(row: rows.SandboxIntent, now: int, lease: rows.Lease) -> list[Made]:
    intent = {
        "key": row.key, "role": row.role, "provider": row.provider, "provider_ref": row.provider_ref,
        "env_name": row.env_name, "status": "intent", "ttl_s": row.ttl_s, "intent_at": now,
        "create_deadline": now + round(row.create_timeout_s * 1000),
    }  # fmt: skip
    return [("intent", intent | _whose(lease))]


@_made.register
def _(row: rows.SandboxLive, now: int, lease: rows.Lease) -> list[Made]:
    live = {"of_key": row.key, "ids": row.provider_ids, "how": row.isolation, "now": now}
    return [("live", live | _numbered(lease))]


@_made.register
def _(row: rows.SandboxReleasing, now: int, lease: rows.Lease) -> list[Made]:
    return [
        (
            "releasing",
            {
                "of": lease.rollout_id,
                "every": int(row.key is None),
                "of_key": row.key or "",
                "but": row.but or "",
                "now": now,
            },
        )
    ]
