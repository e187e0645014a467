"""Evidence: what agents did, what they left, how it was graded and what it was worth."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_JSON = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")
_APPEND_ONLY = ("grades", "rewards", "patches", "steps", "llm_calls")


def upgrade() -> None:
    """Create the evidence tables and the guards that keep them append-only."""
    _create_validations()
    _create_grades()
    _create_llm_calls()
    _create_patches()
    _create_rewards()
    _create_steps()
    for table in _APPEND_ONLY:
        _refuse(f"{table}_no_update", "UPDATE", table, f"{table} is append-only")
    for table in (*_APPEND_ONLY, "validations"):
        _refuse(f"{table}_no_delete", "DELETE", table, f"{table} keeps its rows")


def _refuse(name: str, event: str, table: str, message: str, when: str = "") -> None:
    """Make the database refuse an event, in the words of its engine."""
    if op.get_bind().dialect.name == "sqlite":
        condition = f" WHEN {when}" if when else ""
        op.execute(
            f"CREATE TRIGGER {name} BEFORE {event} ON {table}{condition} BEGIN SELECT RAISE(ABORT, '{message}'); END"
        )
        return
    back = "OLD" if event == "DELETE" else "NEW"
    op.execute(
        f"CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $guard$ BEGIN"
        f" IF {when or 'true'} THEN RAISE EXCEPTION '{message}' USING ERRCODE = 'integrity_constraint_violation';"
        f" END IF; RETURN {back}; END $guard$"
    )
    op.execute(f"CREATE TRIGGER {name} BEFORE {event} ON {table} FOR EACH ROW EXECUTE FUNCTION {name}()")


def _create_validations() -> None:
    op.create_table(
        "validations",
        sa.Column("task_sha256", sa.Text(), nullable=False),
        sa.Column("grader_digest", sa.Text(), nullable=False),
        sa.Column("run_no", sa.Integer(), nullable=False),
        sa.Column("patch", sa.Text(), nullable=False),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("as_expected", sa.Integer(), nullable=False),
        sa.Column("reasons", _JSON, nullable=False),
        sa.Column("test_map", sa.Text(), nullable=True),
        sa.Column("log", sa.Text(), nullable=True),
        sa.Column("duration_s", sa.Float(), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("patch IN ('noop', 'gold')", name=op.f("ck_validations_patch_kind")),
        sa.ForeignKeyConstraint(["log"], ["artifacts.sha256"], name=op.f("fk_validations_log")),
        sa.ForeignKeyConstraint(
            ["task_sha256"], ["tasks.task_sha256"], name=op.f("fk_validations_task_sha256")
        ),
        sa.ForeignKeyConstraint(["test_map"], ["artifacts.sha256"], name=op.f("fk_validations_test_map")),
        sa.PrimaryKeyConstraint(
            "task_sha256", "grader_digest", "run_no", "patch", name=op.f("pk_validations")
        ),
    )


def _create_grades() -> None:
    op.create_table(
        "grades",
        sa.Column("grade_id", sa.Text(), nullable=False),
        sa.Column("rollout_id", sa.Text(), nullable=False),
        sa.Column("fence", sa.Integer(), nullable=False),
        sa.Column("patch_sha256", sa.Text(), nullable=False),
        sa.Column("grader_digest", sa.Text(), nullable=False),
        sa.Column("run_no", sa.Integer(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("verdict", sa.Integer(), nullable=False),
        sa.Column("reward", sa.Float(), nullable=True),
        sa.Column("mask_sample", sa.Integer(), nullable=False),
        sa.Column("evidence", sa.Text(), nullable=False),
        sa.Column("f2p_pass", sa.Integer(), nullable=False),
        sa.Column("f2p_total", sa.Integer(), nullable=False),
        sa.Column("p2p_pass", sa.Integer(), nullable=False),
        sa.Column("p2p_total", sa.Integer(), nullable=False),
        sa.Column("test_map", sa.Text(), nullable=False),
        sa.Column("log", sa.Text(), nullable=False),
        sa.Column("exit_code", sa.Integer(), nullable=True),
        sa.Column("grader", sa.Text(), nullable=False),
        sa.Column("grader_version", sa.Text(), nullable=False),
        sa.Column("task_sha256", sa.Text(), nullable=False),
        sa.Column("eval_sha256", sa.Text(), nullable=False),
        sa.Column("isolation", sa.Text(), nullable=True),
        sa.Column("sandbox_key", sa.Text(), nullable=True),
        sa.Column("flags", _JSON, nullable=False),
        sa.Column("duration_s", sa.Float(), nullable=False),
        sa.Column("ended_at", sa.BigInteger(), nullable=False),
        sa.Column("error_class", sa.Text(), nullable=True),
        sa.Column("error_text", sa.Text(), nullable=True),
        sa.CheckConstraint("reason IN ('first', 'regrade')", name=op.f("ck_grades_reason")),
        sa.CheckConstraint("mask_sample = 0 OR reward IS NULL", name=op.f("ck_grades_no_masked_number")),
        sa.CheckConstraint("verdict = 1 OR reward IS NULL", name=op.f("ck_grades_no_reward_without_verdict")),
        sa.ForeignKeyConstraint(["log"], ["artifacts.sha256"], name=op.f("fk_grades_log")),
        sa.ForeignKeyConstraint(["rollout_id"], ["rollouts.id"], name=op.f("fk_grades_rollout_id")),
        sa.ForeignKeyConstraint(["test_map"], ["artifacts.sha256"], name=op.f("fk_grades_test_map")),
        sa.PrimaryKeyConstraint("grade_id", name=op.f("pk_grades")),
        sa.UniqueConstraint(
            "rollout_id",
            "patch_sha256",
            "grader_digest",
            "run_no",
            name=op.f("uq_grades_rollout_id_patch_sha256_grader_digest_run_no"),
        ),
    )
    op.create_index(
        "ux_grades_first_verdict",
        "grades",
        ["rollout_id", "patch_sha256", "grader_digest"],
        unique=True,
        sqlite_where=sa.text("reason = 'first' AND verdict = 1"),
        postgresql_where=sa.text("reason = 'first' AND verdict = 1"),
    )


def _create_llm_calls() -> None:
    op.create_table(
        "llm_calls",
        sa.Column("rollout_id", sa.Text(), nullable=False),
        sa.Column("fence", sa.Integer(), nullable=False),
        sa.Column("call_no", sa.Integer(), nullable=False),
        sa.Column("via", sa.Text(), nullable=False),
        sa.Column("source_seq", sa.Integer(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("lane", sa.Text(), nullable=True),
        sa.Column("step", sa.Text(), nullable=True),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("request_sha256", sa.Text(), nullable=False),
        sa.Column("response_id", sa.Text(), nullable=True),
        sa.Column("model", sa.Text(), nullable=True),
        sa.Column("http_status", sa.Integer(), nullable=True),
        sa.Column("finish_reason", sa.Text(), nullable=True),
        sa.Column("prompt_tokens", sa.Integer(), nullable=False),
        sa.Column("completion_tokens", sa.Integer(), nullable=False),
        sa.Column("cached_tokens", sa.Integer(), nullable=False),
        sa.Column("duration_ms", sa.Integer(), nullable=False),
        sa.Column("retry_of", sa.Integer(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.CheckConstraint(
            "outcome IN ('ok', 'refused', 'ambiguous', 'error')", name=op.f("ck_llm_calls_outcome")
        ),
        sa.ForeignKeyConstraint(
            ["rollout_id", "fence"],
            ["attempts.rollout_id", "attempts.fence"],
            name=op.f("fk_llm_calls_rollout_id_fence"),
        ),
        sa.PrimaryKeyConstraint("rollout_id", "fence", "call_no", name=op.f("pk_llm_calls")),
        sa.UniqueConstraint(
            "rollout_id",
            "fence",
            "via",
            "source_seq",
            name=op.f("uq_llm_calls_rollout_id_fence_via_source_seq"),
        ),
    )


def _create_patches() -> None:
    op.create_table(
        "patches",
        sa.Column("rollout_id", sa.Text(), nullable=False),
        sa.Column("fence", sa.Integer(), nullable=False),
        sa.Column("n", sa.Integer(), nullable=False),
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("artifact", sa.Text(), nullable=False),
        sa.Column("size", sa.Integer(), nullable=False),
        sa.Column("base_commit", sa.Text(), nullable=False),
        sa.Column("exit_reason", sa.Text(), nullable=False),
        sa.Column("exit_message", sa.Text(), nullable=False),
        sa.Column("files", sa.Integer(), nullable=False),
        sa.Column("insertions", sa.Integer(), nullable=False),
        sa.Column("deletions", sa.Integer(), nullable=False),
        sa.Column("paths", _JSON, nullable=False),
        sa.Column("notes", _JSON, nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["artifact"], ["artifacts.sha256"], name=op.f("fk_patches_artifact")),
        sa.ForeignKeyConstraint(
            ["rollout_id", "fence"],
            ["attempts.rollout_id", "attempts.fence"],
            name=op.f("fk_patches_rollout_id_fence"),
        ),
        sa.PrimaryKeyConstraint("rollout_id", "fence", "n", name=op.f("pk_patches")),
    )


def _create_rewards() -> None:
    op.create_table(
        "rewards",
        sa.Column("rollout_id", sa.Text(), nullable=False),
        sa.Column("grade_id", sa.Text(), nullable=False),
        sa.Column("reward", sa.Float(), nullable=True),
        sa.Column("valid", sa.Integer(), nullable=False),
        sa.Column("invalid_reason", sa.Text(), nullable=True),
        sa.Column("reward_fn_version", sa.Text(), nullable=False),
        sa.Column("outcome_table", sa.Integer(), nullable=False),
        sa.Column("stats", sa.Text(), nullable=False),
        sa.Column("stats_sha256", sa.Text(), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("(valid = 1) = (invalid_reason IS NULL)", name=op.f("ck_rewards_invalid_reason")),
        sa.CheckConstraint("(valid = 1) = (reward IS NOT NULL)", name=op.f("ck_rewards_valid")),
        sa.ForeignKeyConstraint(["grade_id"], ["grades.grade_id"], name=op.f("fk_rewards_grade_id")),
        sa.ForeignKeyConstraint(["rollout_id"], ["rollouts.id"], name=op.f("fk_rewards_rollout_id")),
        sa.PrimaryKeyConstraint("rollout_id", name=op.f("pk_rewards")),
    )


def _create_steps() -> None:
    op.create_table(
        "steps",
        sa.Column("rollout_id", sa.Text(), nullable=False),
        sa.Column("fence", sa.Integer(), nullable=False),
        sa.Column("attempt_no", sa.Integer(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("output", sa.Text(), nullable=False),
        sa.Column("output_sha256", sa.Text(), nullable=False),
        sa.Column("tool_calls", sa.Integer(), nullable=False),
        sa.Column("format_errors", sa.Integer(), nullable=False),
        sa.Column("command_timeouts", sa.Integer(), nullable=False),
        sa.Column("truncated_observations", sa.Integer(), nullable=False),
        sa.Column("tool_ms", sa.Integer(), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["rollout_id", "fence"],
            ["attempts.rollout_id", "attempts.fence"],
            name=op.f("fk_steps_rollout_id_fence"),
        ),
        sa.PrimaryKeyConstraint("rollout_id", "attempt_no", "name", name=op.f("pk_steps")),
    )
