"""How each kind of fact becomes rows. Called only by the write primitive, which has checked fence and lease."""

from __future__ import annotations

import hashlib
from functools import singledispatch
from typing import TYPE_CHECKING

import sqlalchemy as sa
from sqlalchemy.dialects.sqlite import insert as sqlite_insert

from store import errors, rows, schema
from store.schema import LEDGER_OPEN, artifacts, grades, llm_calls, patches, rewards, sandboxes, steps

if TYPE_CHECKING:
    from collections.abc import Sequence


def apply_all(connection: sa.Connection, now: int, lease: rows.Lease, extra: Sequence[rows.Row]) -> None:
    """Store every fact of `extra`, in order."""
    for row in extra:
        apply(row, connection, now, lease)


@singledispatch
def apply(row: object, _connection: sa.Connection, _now: int, _lease: rows.Lease) -> None:
    """Store one fact under the lease's fence, stamped `now`."""
    raise TypeError(f"the store knows no row of type {type(row).__name__}")


def keep(connection: sa.Connection, artifact: rows.Artifact) -> str:
    """Store an artifact unless it is there and return its digest."""
    connection.execute(
        sqlite_insert(artifacts).on_conflict_do_nothing(),
        {"sha256": artifact.sha256, "codec": artifact.codec, "size": artifact.size, "bytes": artifact.stored},
    )
    return artifact.sha256


def keep_task(
    connection: sa.Connection, now: int, row: rows.NewRollout | rows.ValidationRow, record: rows.Artifact
) -> None:
    """Store a task record unless it is there."""
    connection.execute(
        sqlite_insert(schema.tasks).on_conflict_do_nothing(),
        {
            "task_sha256": row.task_sha256, "instance_id": row.instance_id, "dataset_kind": row.dataset_kind,
            "eval_sha256": row.eval_sha256, "record": keep(connection, record), "created_at": now,
        },
    )  # fmt: skip


@apply.register
def _step(row: rows.StepRow, connection: sa.Connection, now: int, lease: rows.Lease) -> None:
    output = rows.canonical_json(row.output)
    connection.execute(
        sa.insert(steps),
        {
            "rollout_id": lease.rollout_id, "fence": lease.fence, "attempt_no": lease.attempt_no, "name": row.name,
            "output": output, "output_sha256": hashlib.sha256(output.encode()).hexdigest(),
            "tool_calls": row.tool_calls, "format_errors": row.format_errors,
            "command_timeouts": row.command_timeouts, "truncated_observations": row.truncated_observations,
            "tool_ms": row.tool_ms, "at": now,
        },
    )  # fmt: skip


@apply.register
def _llm_call(row: rows.LlmCallRow, connection: sa.Connection, now: int, lease: rows.Lease) -> None:
    call_no = _next(connection, llm_calls, llm_calls.c.call_no, lease)
    connection.execute(
        sa.insert(llm_calls),
        {
            "rollout_id": lease.rollout_id, "fence": lease.fence, "call_no": call_no, "via": row.via,
            "source_seq": call_no, "kind": row.kind, "lane": row.lane, "step": row.step, "outcome": row.outcome,
            "request_sha256": row.request_sha256, "response_id": row.response_id, "model": row.model,
            "http_status": row.http_status, "finish_reason": row.finish_reason, "prompt_tokens": row.prompt_tokens,
            "completion_tokens": row.completion_tokens, "cached_tokens": row.cached_tokens,
            "duration_ms": row.duration_ms, "error": row.error, "at": now,
        },
    )  # fmt: skip


@apply.register
def _patch(row: rows.PatchRow, connection: sa.Connection, now: int, lease: rows.Lease) -> None:
    connection.execute(
        sa.insert(patches),
        {
            "rollout_id": lease.rollout_id, "fence": lease.fence,
            "n": _next(connection, patches, patches.c.n, lease), "sha256": row.artifact.sha256,
            "artifact": keep(connection, row.artifact), "size": row.artifact.size, "base_commit": row.base_commit,
            "exit_reason": row.exit_reason, "exit_message": row.exit_message, "files": len(row.paths),
            "insertions": row.insertions, "deletions": row.deletions, "paths": row.paths, "notes": row.notes, "at": now,
        },
    )  # fmt: skip


@apply.register
def _grade(row: rows.GradeRow, connection: sa.Connection, now: int, lease: rows.Lease) -> None:
    same = (
        grades.c.rollout_id == lease.rollout_id,
        grades.c.patch_sha256 == row.patch_sha256,
        grades.c.grader_digest == row.grader_digest,
    )
    run_no = connection.execute(
        sa.select(sa.func.coalesce(sa.func.max(grades.c.run_no), 0) + 1).where(*same)
    ).scalar()
    connection.execute(
        sa.insert(grades),
        {
            "grade_id": row.grade_id, "rollout_id": lease.rollout_id, "fence": lease.fence,
            "patch_sha256": row.patch_sha256, "grader_digest": row.grader_digest, "run_no": run_no,
            "reason": row.reason, "outcome": row.outcome, "verdict": int(row.verdict), "reward": row.reward,
            "mask_sample": int(row.mask_sample), "evidence": row.evidence, "f2p_pass": row.f2p_pass,
            "f2p_total": row.f2p_total, "p2p_pass": row.p2p_pass, "p2p_total": row.p2p_total,
            "test_map": keep(connection, row.test_map), "log": keep(connection, row.log), "exit_code": row.exit_code,
            "grader": row.grader, "grader_version": row.grader_version, "task_sha256": row.task_sha256,
            "eval_sha256": row.eval_sha256, "isolation": row.isolation, "sandbox_key": row.sandbox_key,
            "flags": row.flags, "duration_s": row.duration_s, "ended_at": now, "error_class": row.error_class,
            "error_text": row.error_text,
        },
    )  # fmt: skip


@apply.register
def _reward(row: rows.RewardRow, connection: sa.Connection, now: int, lease: rows.Lease) -> None:
    stats = rows.canonical_json(row.stats)
    connection.execute(
        sa.insert(rewards),
        {
            "rollout_id": lease.rollout_id, "grade_id": row.grade_id, "reward": row.reward,
            "valid": int(row.reward is not None), "invalid_reason": row.invalid_reason,
            "reward_fn_version": row.reward_fn_version, "outcome_table": row.outcome_table, "stats": stats,
            "stats_sha256": hashlib.sha256(stats.encode()).hexdigest(), "at": now,
        },
    )  # fmt: skip


@apply.register
def _intent(row: rows.SandboxIntent, connection: sa.Connection, now: int, lease: rows.Lease) -> None:
    connection.execute(
        sa.insert(sandboxes),
        {
            "key": row.key, "rollout_id": lease.rollout_id, "fence": lease.fence, "role": row.role,
            "provider": row.provider, "provider_ref": row.provider_ref, "env_name": row.env_name, "status": "intent",
            "ttl_s": row.ttl_s, "intent_at": now, "create_deadline": now + round(row.create_timeout_s * 1000),
        },
    )  # fmt: skip


@apply.register
def _live(row: rows.SandboxLive, connection: sa.Connection, now: int, lease: rows.Lease) -> None:
    changed = connection.execute(
        sa.update(sandboxes)
        .where(
            sandboxes.c.key == row.key,
            sandboxes.c.rollout_id == lease.rollout_id,
            sandboxes.c.fence == lease.fence,
            sandboxes.c.status == "intent",
        )
        .values(
            status="live",
            provider_ids=row.provider_ids,
            isolation=row.isolation,
            live_at=now,
            expires_at=now + sandboxes.c.ttl_s * 1000,
        )
        .returning(sandboxes.c.key)
    ).fetchall()
    if len(changed) != 1:
        raise errors.Conflict(f"sandbox {row.key} was not waiting for its create call")


@apply.register
def _releasing(row: rows.SandboxReleasing, connection: sa.Connection, now: int, lease: rows.Lease) -> None:
    which = sandboxes.c.key == row.key if row.key is not None else sandboxes.c.status.in_(LEDGER_OPEN)
    connection.execute(
        sa.update(sandboxes)
        .where(sandboxes.c.rollout_id == lease.rollout_id, sandboxes.c.status.in_(("intent", "live")), which)
        .values(status="releasing", release_requested_at=now)
    )


def _next(connection: sa.Connection, table: sa.Table, column: sa.Column[int], lease: rows.Lease) -> int:
    found = connection.execute(
        sa.select(sa.func.coalesce(sa.func.max(column), 0) + 1).where(
            table.c.rollout_id == lease.rollout_id, table.c.fence == lease.fence
        )
    ).scalar_one()
    return int(found)
