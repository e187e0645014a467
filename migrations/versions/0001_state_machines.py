"""The first schema: rollouts as persisted state machines, the sandbox ledger, and the guards over both."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_JSON = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")

_EDGES = [
    ("created", "provision", "sandbox_ready"),
    ("sandbox_ready", "start_agent", "agent_running"),
    ("agent_running", "take_patch", "patched"),
    ("patched", "grade", "graded"),
    ("graded", "release", "released"),
    ("sandbox_ready", "restart", "created"),
    ("agent_running", "restart", "created"),
    ("patched", "restart", "created"),
    ("created", "fail", "failed"),
    ("sandbox_ready", "fail", "failed"),
    ("agent_running", "fail", "failed"),
    ("patched", "fail", "failed"),
]

_APPEND_ONLY = ("transitions", "fsm_edges")
_KEPT = ("rollouts", "attempts", "sandboxes", "tasks", "artifacts", "workers")


def upgrade() -> None:
    """Create every table, index and guard, and seed the edges of the state machine."""
    _create_artifacts()
    _create_fsm_edges()
    _create_schema_meta()
    _create_workers()
    _create_tasks()
    _create_rollouts()
    _create_attempts()
    _create_sandboxes()
    _create_transitions()
    edges = sa.table("fsm_edges", sa.column("src"), sa.column("trig"), sa.column("dst"))
    op.bulk_insert(edges, [{"src": src, "trig": trig, "dst": dst} for src, trig, dst in _EDGES])
    for table in _APPEND_ONLY:
        _refuse(f"{table}_no_update", "UPDATE", table, f"{table} is append-only")
    for table in _APPEND_ONLY + _KEPT:
        _refuse(f"{table}_no_delete", "DELETE", table, f"{table} keeps its rows")
    _refuse(
        "rollouts_terminal",
        "UPDATE",
        "rollouts",
        "a released or failed rollout is immutable",
        "OLD.state IN ('released', 'failed')",
    )
    _refuse(
        "rollouts_edge",
        "UPDATE OF state",
        "rollouts",
        "the state machine has no such edge",
        "NEW.state <> OLD.state AND NOT EXISTS"
        " (SELECT 1 FROM fsm_edges WHERE src = OLD.state AND dst = NEW.state)",
    )
    _refuse(
        "rollouts_logged",
        "UPDATE OF state",
        "rollouts",
        "a state change must raise the version by one",
        "NEW.version <> OLD.version + 1",
    )
    _refuse(
        "rollouts_born",
        "INSERT",
        "rollouts",
        "a rollout begins in created",
        "NEW.state <> 'created' OR NEW.version <> 0",
    )


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


def _create_artifacts() -> None:
    op.create_table(
        "artifacts",
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("codec", sa.Text(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("bytes", sa.LargeBinary(), nullable=True),
        sa.Column("location", sa.Text(), nullable=True),
        sa.CheckConstraint("(bytes IS NULL) <> (location IS NULL)", name=op.f("ck_artifacts_somewhere")),
        sa.PrimaryKeyConstraint("sha256", name=op.f("pk_artifacts")),
    )


def _create_fsm_edges() -> None:
    op.create_table(
        "fsm_edges",
        sa.Column("src", sa.Text(), nullable=False),
        sa.Column("trig", sa.Text(), nullable=False),
        sa.Column("dst", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("src", "trig", "dst", name=op.f("pk_fsm_edges")),
        sa.UniqueConstraint("src", "trig", name=op.f("uq_fsm_edges_src_trig")),
    )


def _create_schema_meta() -> None:
    op.create_table(
        "schema_meta",
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("key", name=op.f("pk_schema_meta")),
    )


def _create_workers() -> None:
    op.create_table(
        "workers",
        sa.Column("worker_id", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("boot_id", sa.Text(), nullable=False),
        sa.Column("pid_ns", sa.Text(), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("pid_started", sa.Text(), nullable=False),
        sa.Column("code_version", sa.Text(), nullable=False),
        sa.Column("started_at", sa.BigInteger(), nullable=False),
        sa.Column("heartbeat_at", sa.BigInteger(), nullable=False),
        sa.Column("stopping", sa.Integer(), server_default="0", nullable=False),
        sa.PrimaryKeyConstraint("worker_id", name=op.f("pk_workers")),
    )


def _create_tasks() -> None:
    op.create_table(
        "tasks",
        sa.Column("task_sha256", sa.Text(), nullable=False),
        sa.Column("instance_id", sa.Text(), nullable=False),
        sa.Column("dataset_kind", sa.Text(), nullable=False),
        sa.Column("eval_sha256", sa.Text(), nullable=False),
        sa.Column("record", sa.Text(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["record"], ["artifacts.sha256"], name=op.f("fk_tasks_record")),
        sa.PrimaryKeyConstraint("task_sha256", name=op.f("pk_tasks")),
    )


def _rollout_rules() -> tuple[sa.Constraint, ...]:
    return (
        sa.CheckConstraint(
            "(failure_class IS NOT NULL) = (state = 'failed')", name=op.f("ck_rollouts_failure")
        ),
        sa.CheckConstraint(
            "(finished_at IS NULL) = (NOT state IN ('released', 'failed'))", name=op.f("ck_rollouts_finished")
        ),
        sa.CheckConstraint(
            "endpoint_kind IN ('session', 'stateless')", name=op.f("ck_rollouts_endpoint_kind")
        ),
        sa.CheckConstraint(
            "state IN ('created', 'sandbox_ready', 'agent_running', 'patched', 'graded', 'released', 'failed')",
            name=op.f("ck_rollouts_state"),
        ),
        sa.CheckConstraint("(lease_owner IS NULL) = (lease_until IS NULL)", name=op.f("ck_rollouts_lease")),
        sa.CheckConstraint("(parent_id IS NULL) = (relation IS NULL)", name=op.f("ck_rollouts_relation")),
        sa.ForeignKeyConstraint(["parent_id"], ["rollouts.id"], name=op.f("fk_rollouts_parent_id")),
        sa.ForeignKeyConstraint(["task_sha256"], ["tasks.task_sha256"], name=op.f("fk_rollouts_task_sha256")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_rollouts")),
        sa.UniqueConstraint("idem_key", name=op.f("uq_rollouts_idem_key")),
    )


def _create_rollouts() -> None:
    op.create_table(
        "rollouts",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("parent_id", sa.Text(), nullable=True),
        sa.Column("relation", sa.Text(), nullable=True),
        sa.Column("idem_key", sa.Text(), nullable=False),
        sa.Column("request_sha256", sa.Text(), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("group_id", sa.Text(), nullable=True),
        sa.Column("sample", sa.Integer(), server_default="0", nullable=False),
        sa.Column("retry_no", sa.Integer(), server_default="0", nullable=False),
        sa.Column("instance_id", sa.Text(), nullable=False),
        sa.Column("task_sha256", sa.Text(), nullable=False),
        sa.Column("agent_type", sa.Text(), nullable=False),
        sa.Column("config_sha256", sa.Text(), nullable=False),
        sa.Column("endpoint_kind", sa.Text(), nullable=False),
        sa.Column("session_ref", sa.Text(), nullable=True),
        sa.Column("policy_version", sa.Text(), nullable=True),
        sa.Column("input", _JSON, nullable=False),
        sa.Column("state", sa.Text(), server_default="created", nullable=False),
        sa.Column("version", sa.Integer(), server_default="0", nullable=False),
        sa.Column("fence", sa.Integer(), server_default="0", nullable=False),
        sa.Column("lease_owner", sa.Text(), nullable=True),
        sa.Column("lease_until", sa.BigInteger(), nullable=True),
        sa.Column("attempts", sa.Integer(), server_default="0", nullable=False),
        sa.Column("crash_count", sa.Integer(), server_default="0", nullable=False),
        sa.Column("infra_count", sa.Integer(), server_default="0", nullable=False),
        sa.Column("grade_count", sa.Integer(), server_default="0", nullable=False),
        sa.Column("rescue_count", sa.Integer(), server_default="0", nullable=False),
        sa.Column("not_before", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("deadline_at", sa.BigInteger(), nullable=True),
        sa.Column("cancel_requested_at", sa.BigInteger(), nullable=True),
        sa.Column("fsm_version", sa.Integer(), nullable=False),
        sa.Column("outcome_table", sa.Integer(), nullable=False),
        sa.Column("failure_class", sa.Text(), nullable=True),
        sa.Column("failure_msg", sa.Text(), nullable=True),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
        sa.Column("finished_at", sa.BigInteger(), nullable=True),
        *_rollout_rules(),
    )
    op.create_index(
        "ix_rollouts_live",
        "rollouts",
        ["not_before", "id"],
        unique=False,
        sqlite_where=sa.text("NOT state IN ('released', 'failed')"),
        postgresql_where=sa.text("NOT state IN ('released', 'failed')"),
    )
    op.create_index(
        "ix_rollouts_run", "rollouts", ["run_id", "instance_id", "sample", "retry_no"], unique=False
    )


def _create_attempts() -> None:
    op.create_table(
        "attempts",
        sa.Column("rollout_id", sa.Text(), nullable=False),
        sa.Column("fence", sa.Integer(), nullable=False),
        sa.Column("attempt_no", sa.Integer(), nullable=False),
        sa.Column("worker_id", sa.Text(), nullable=False),
        sa.Column("code_version", sa.Text(), nullable=False),
        sa.Column("claimed_at", sa.BigInteger(), nullable=False),
        sa.Column("ended_at", sa.BigInteger(), nullable=True),
        sa.Column("outcome", sa.Text(), nullable=True),
        sa.Column("error_class", sa.Text(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.CheckConstraint(
            "outcome IN ('done', 'failed', 'lease_lost', 'interrupted', 'crashed')",
            name=op.f("ck_attempts_outcome"),
        ),
        sa.CheckConstraint("(ended_at IS NULL) = (outcome IS NULL)", name=op.f("ck_attempts_ended")),
        sa.ForeignKeyConstraint(["rollout_id"], ["rollouts.id"], name=op.f("fk_attempts_rollout_id")),
        sa.PrimaryKeyConstraint("rollout_id", "fence", name=op.f("pk_attempts")),
    )


def _create_sandboxes() -> None:
    op.create_table(
        "sandboxes",
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("rollout_id", sa.Text(), nullable=True),
        sa.Column("fence", sa.Integer(), nullable=False),
        sa.Column("role", sa.Text(), nullable=False),
        sa.Column("provider", sa.Text(), nullable=False),
        sa.Column("provider_ref", sa.Text(), nullable=False),
        sa.Column("env_name", sa.Text(), nullable=True),
        sa.Column("isolation", sa.Text(), nullable=True),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("provider_ids", _JSON, nullable=True),
        sa.Column("ttl_s", sa.Integer(), nullable=False),
        sa.Column("intent_at", sa.BigInteger(), nullable=False),
        sa.Column("create_deadline", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=True),
        sa.Column("live_at", sa.BigInteger(), nullable=True),
        sa.Column("release_requested_at", sa.BigInteger(), nullable=True),
        sa.Column("released_at", sa.BigInteger(), nullable=True),
        sa.Column("proof", sa.Text(), nullable=True),
        sa.Column("release_attempts", sa.Integer(), server_default="0", nullable=False),
        sa.Column("last_error", sa.Text(), nullable=True),
        sa.CheckConstraint(
            "(proof IS NOT NULL) = (status IN ('released', 'lost'))", name=op.f("ck_sandboxes_proof")
        ),
        sa.CheckConstraint("role IN ('task', 'grading')", name=op.f("ck_sandboxes_role")),
        sa.CheckConstraint(
            "status IN ('intent', 'live', 'releasing', 'released', 'lost')", name=op.f("ck_sandboxes_status")
        ),
        sa.ForeignKeyConstraint(["rollout_id"], ["rollouts.id"], name=op.f("fk_sandboxes_rollout_id")),
        sa.PrimaryKeyConstraint("key", name=op.f("pk_sandboxes")),
    )
    op.create_index(
        "ix_sandboxes_open",
        "sandboxes",
        ["key"],
        unique=False,
        sqlite_where=sa.text("status IN ('intent', 'live', 'releasing')"),
        postgresql_where=sa.text("status IN ('intent', 'live', 'releasing')"),
    )
    op.create_index("ix_sandboxes_rollout", "sandboxes", ["rollout_id"], unique=False)


def _create_transitions() -> None:
    op.create_table(
        "transitions",
        sa.Column("rollout_id", sa.Text(), nullable=False),
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("src", sa.Text(), nullable=False),
        sa.Column("trig", sa.Text(), nullable=False),
        sa.Column("dst", sa.Text(), nullable=False),
        sa.Column("fence", sa.Integer(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("op_id", sa.Text(), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.Column("payload", _JSON, nullable=False),
        sa.ForeignKeyConstraint(["rollout_id"], ["rollouts.id"], name=op.f("fk_transitions_rollout_id")),
        sa.ForeignKeyConstraint(
            ["src", "trig", "dst"],
            ["fsm_edges.src", "fsm_edges.trig", "fsm_edges.dst"],
            name=op.f("fk_transitions_src_trig_dst"),
        ),
        sa.PrimaryKeyConstraint("rollout_id", "seq", name=op.f("pk_transitions")),
    )
