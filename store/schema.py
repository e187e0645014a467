"""The tables, once, for both engines. Constraints here make bad states unrepresentable; `triggers` guards history.

Every `..._at`, `..._until` and `not_before` is an integer of epoch milliseconds from the database's clock.
"""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    Column,
    Float,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

STATES = ("created", "sandbox_ready", "agent_running", "patched", "graded", "released", "failed")
TERMINAL = ("released", "failed")
ATTEMPT_OUTCOMES = ("done", "failed", "lease_lost", "interrupted", "crashed")
LEDGER_OPEN, LEDGER_CLOSED = ("intent", "live", "releasing"), ("released", "lost")

_Json = JSON().with_variant(JSONB(), "postgresql")
_Ms = BigInteger


def _one_of(column: str, values: tuple[str, ...]) -> str:
    return f"{column} IN ({', '.join(repr(v) for v in values)})"


metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

schema_meta = Table(
    "schema_meta", metadata, Column("key", Text, primary_key=True), Column("value", Text, nullable=False)
)

fsm_edges = Table(
    "fsm_edges",
    metadata,
    Column("src", Text, nullable=False),
    Column("trig", Text, nullable=False),
    Column("dst", Text, nullable=False),
    PrimaryKeyConstraint("src", "trig", "dst"),
    UniqueConstraint("src", "trig"),
)

artifacts = Table(
    "artifacts",
    metadata,
    Column("sha256", Text, primary_key=True),
    Column("codec", Text, nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("bytes", LargeBinary),
    Column("location", Text),
    CheckConstraint("(bytes IS NULL) <> (location IS NULL)", name="somewhere"),
)

tasks = Table(
    "tasks",
    metadata,
    Column("task_sha256", Text, primary_key=True),
    Column("instance_id", Text, nullable=False),
    Column("dataset_kind", Text, nullable=False),
    Column("eval_sha256", Text, nullable=False),
    Column("record", Text, ForeignKey("artifacts.sha256"), nullable=False),
    Column("created_at", _Ms, nullable=False),
)

validations = Table(
    "validations",
    metadata,
    Column("task_sha256", Text, ForeignKey("tasks.task_sha256"), nullable=False),
    Column("grader_digest", Text, nullable=False),
    Column("run_no", Integer, nullable=False),
    Column("patch", Text, nullable=False),
    Column("outcome", Text, nullable=False),
    Column("as_expected", Integer, nullable=False),
    Column("reasons", _Json, nullable=False),
    Column("test_map", Text, ForeignKey("artifacts.sha256")),
    Column("log", Text, ForeignKey("artifacts.sha256")),
    Column("duration_s", Float, nullable=False),
    Column("at", _Ms, nullable=False),
    PrimaryKeyConstraint("task_sha256", "grader_digest", "run_no", "patch"),
    CheckConstraint(_one_of("patch", ("noop", "gold")), name="patch_kind"),
)

workers = Table(
    "workers",
    metadata,
    Column("worker_id", Text, primary_key=True),
    Column("host", Text, nullable=False),
    Column("boot_id", Text, nullable=False),
    Column("pid_ns", Text, nullable=False),
    Column("pid", Integer, nullable=False),
    Column("pid_started", Text, nullable=False),
    Column("code_version", Text, nullable=False),
    Column("started_at", _Ms, nullable=False),
    Column("heartbeat_at", _Ms, nullable=False),
    Column("stopping", Integer, nullable=False, server_default="0"),
    Column("last_batch", BigInteger, nullable=False, server_default="0"),
)

rollouts = Table(
    "rollouts",
    metadata,
    Column("id", Text, primary_key=True),
    Column("parent_id", Text, ForeignKey("rollouts.id")),
    Column("relation", Text),
    Column("idem_key", Text, nullable=False),
    Column("request_sha256", Text, nullable=False),
    Column("run_id", Text, nullable=False),
    Column("group_id", Text),
    Column("sample", Integer, nullable=False, server_default="0"),
    Column("retry_no", Integer, nullable=False, server_default="0"),
    Column("instance_id", Text, nullable=False),
    Column("task_sha256", Text, ForeignKey("tasks.task_sha256"), nullable=False),
    Column("agent_type", Text, nullable=False),
    Column("config_sha256", Text, nullable=False),
    Column("endpoint_kind", Text, nullable=False),
    Column("session_ref", Text),
    Column("policy_version", Text),
    Column("input", _Json, nullable=False),
    Column("state", Text, nullable=False, server_default="created"),
    Column("version", Integer, nullable=False, server_default="0"),
    Column("fence", Integer, nullable=False, server_default="0"),
    Column("lease_owner", Text),
    Column("lease_until", _Ms),
    Column("attempts", Integer, nullable=False, server_default="0"),
    Column("crash_count", Integer, nullable=False, server_default="0"),
    Column("infra_count", Integer, nullable=False, server_default="0"),
    Column("grade_count", Integer, nullable=False, server_default="0"),
    Column("rescue_count", Integer, nullable=False, server_default="0"),
    Column("not_before", _Ms, nullable=False, server_default="0"),
    Column("deadline_at", _Ms),
    Column("cancel_requested_at", _Ms),
    Column("fsm_version", Integer, nullable=False),
    Column("outcome_table", Integer, nullable=False),
    Column("failure_class", Text),
    Column("failure_msg", Text),
    Column("created_at", _Ms, nullable=False),
    Column("updated_at", _Ms, nullable=False),
    Column("finished_at", _Ms),
    UniqueConstraint("idem_key"),
    CheckConstraint(_one_of("state", STATES), name="state"),
    CheckConstraint(_one_of("endpoint_kind", ("session", "stateless")), name="endpoint_kind"),
    CheckConstraint("(lease_owner IS NULL) = (lease_until IS NULL)", name="lease"),
    CheckConstraint(f"(finished_at IS NULL) = (NOT {_one_of('state', TERMINAL)})", name="finished"),
    CheckConstraint("(failure_class IS NOT NULL) = (state = 'failed')", name="failure"),
    CheckConstraint("(parent_id IS NULL) = (relation IS NULL)", name="relation"),
    postgresql_with={"fillfactor": 60},
)
IS_LIVE = text("finished_at IS NULL")
"""A query repeats it word for word to use the partial index; it names no state, so that a move changes no index."""
Index(
    "ix_rollouts_unfinished",
    rollouts.c.not_before,
    rollouts.c.id,
    sqlite_where=IS_LIVE,
    postgresql_where=IS_LIVE,
)
Index("ix_rollouts_run", rollouts.c.run_id, rollouts.c.instance_id, rollouts.c.sample, rollouts.c.retry_no)

attempts = Table(
    "attempts",
    metadata,
    Column("rollout_id", Text, ForeignKey("rollouts.id"), nullable=False),
    Column("fence", Integer, nullable=False),
    Column("attempt_no", Integer, nullable=False),
    Column("worker_id", Text, nullable=False),
    Column("code_version", Text, nullable=False),
    Column("claimed_at", _Ms, nullable=False),
    Column("ended_at", _Ms),
    Column("outcome", Text),
    Column("error_class", Text),
    Column("error", Text),
    Column("asked_at", _Ms),
    PrimaryKeyConstraint("rollout_id", "fence"),
    CheckConstraint(_one_of("outcome", ATTEMPT_OUTCOMES), name="outcome"),
    CheckConstraint("(ended_at IS NULL) = (outcome IS NULL)", name="ended"),
)

transitions = Table(
    "transitions",
    metadata,
    Column("rollout_id", Text, ForeignKey("rollouts.id"), nullable=False),
    Column("seq", Integer, nullable=False),
    Column("src", Text, nullable=False),
    Column("trig", Text, nullable=False),
    Column("dst", Text, nullable=False),
    Column("fence", Integer, nullable=False),
    Column("actor", Text, nullable=False),
    Column("op_id", Text, nullable=False),
    Column("at", _Ms, nullable=False),
    Column("payload", _Json, nullable=False),
    PrimaryKeyConstraint("rollout_id", "seq"),
    ForeignKeyConstraint(["src", "trig", "dst"], ["fsm_edges.src", "fsm_edges.trig", "fsm_edges.dst"]),
)

sandboxes = Table(
    "sandboxes",
    metadata,
    Column("key", Text, primary_key=True),
    Column("rollout_id", Text, ForeignKey("rollouts.id")),
    Column("fence", Integer, nullable=False),
    Column("role", Text, nullable=False),
    Column("provider", Text, nullable=False),
    Column("provider_ref", Text, nullable=False),
    Column("env_name", Text),
    Column("isolation", Text),
    Column("status", Text, nullable=False),
    Column("provider_ids", _Json),
    Column("ttl_s", Integer, nullable=False),
    Column("intent_at", _Ms, nullable=False),
    Column("create_deadline", _Ms, nullable=False),
    Column("expires_at", _Ms),
    Column("live_at", _Ms),
    Column("release_requested_at", _Ms),
    Column("released_at", _Ms),
    Column("proof", Text),
    Column("release_attempts", Integer, nullable=False, server_default="0"),
    Column("last_error", Text),
    CheckConstraint(_one_of("role", ("task", "grading")), name="role"),
    CheckConstraint(_one_of("status", LEDGER_OPEN + LEDGER_CLOSED), name="status"),
    CheckConstraint(f"(proof IS NOT NULL) = ({_one_of('status', LEDGER_CLOSED)})", name="proof"),
)
Index("ix_sandboxes_rollout", sandboxes.c.rollout_id)
_OPEN = text(_one_of("status", LEDGER_OPEN))
Index("ix_sandboxes_open", sandboxes.c.key, sqlite_where=_OPEN, postgresql_where=_OPEN)

steps = Table(
    "steps",
    metadata,
    Column("rollout_id", Text, nullable=False),
    Column("fence", Integer, nullable=False),
    Column("attempt_no", Integer, nullable=False),
    Column("name", Text, nullable=False),
    Column("output", Text, nullable=False),
    Column("output_sha256", Text, nullable=False),
    Column("tool_calls", Integer, nullable=False),
    Column("format_errors", Integer, nullable=False),
    Column("command_timeouts", Integer, nullable=False),
    Column("truncated_observations", Integer, nullable=False),
    Column("tool_ms", Integer, nullable=False),
    Column("at", _Ms, nullable=False),
    PrimaryKeyConstraint("rollout_id", "attempt_no", "name"),
    ForeignKeyConstraint(["rollout_id", "fence"], ["attempts.rollout_id", "attempts.fence"]),
)

llm_calls = Table(
    "llm_calls",
    metadata,
    Column("rollout_id", Text, nullable=False),
    Column("fence", Integer, nullable=False),
    Column("call_no", Integer, nullable=False),
    Column("via", Text, nullable=False),
    Column("source_seq", Integer, nullable=False),
    Column("kind", Text, nullable=False),
    Column("lane", Text),
    Column("step", Text),
    Column("outcome", Text, nullable=False),
    Column("request_sha256", Text, nullable=False),
    Column("response_id", Text),
    Column("model", Text),
    Column("http_status", Integer),
    Column("finish_reason", Text),
    Column("prompt_tokens", Integer, nullable=False),
    Column("completion_tokens", Integer, nullable=False),
    Column("cached_tokens", Integer, nullable=False),
    Column("duration_ms", Integer, nullable=False),
    Column("retry_of", Integer),
    Column("error", Text),
    Column("at", _Ms, nullable=False),
    PrimaryKeyConstraint("rollout_id", "fence", "call_no"),
    UniqueConstraint("rollout_id", "fence", "via", "source_seq"),
    ForeignKeyConstraint(["rollout_id", "fence"], ["attempts.rollout_id", "attempts.fence"]),
    CheckConstraint(_one_of("outcome", ("ok", "refused", "ambiguous", "error")), name="outcome"),
)

patches = Table(
    "patches",
    metadata,
    Column("rollout_id", Text, nullable=False),
    Column("fence", Integer, nullable=False),
    Column("n", Integer, nullable=False),
    Column("sha256", Text, nullable=False),
    Column("artifact", Text, ForeignKey("artifacts.sha256"), nullable=False),
    Column("size", Integer, nullable=False),
    Column("base_commit", Text, nullable=False),
    Column("exit_reason", Text, nullable=False),
    Column("exit_message", Text, nullable=False),
    Column("files", Integer, nullable=False),
    Column("insertions", Integer, nullable=False),
    Column("deletions", Integer, nullable=False),
    Column("paths", _Json, nullable=False),
    Column("notes", _Json, nullable=False),
    Column("at", _Ms, nullable=False),
    PrimaryKeyConstraint("rollout_id", "fence", "n"),
    ForeignKeyConstraint(["rollout_id", "fence"], ["attempts.rollout_id", "attempts.fence"]),
)

grades = Table(
    "grades",
    metadata,
    Column("grade_id", Text, primary_key=True),
    Column("rollout_id", Text, ForeignKey("rollouts.id"), nullable=False),
    Column("fence", Integer, nullable=False),
    Column("patch_sha256", Text, nullable=False),
    Column("grader_digest", Text, nullable=False),
    Column("run_no", Integer, nullable=False),
    Column("reason", Text, nullable=False),
    Column("outcome", Text, nullable=False),
    Column("verdict", Integer, nullable=False),
    Column("reward", Float),
    Column("mask_sample", Integer, nullable=False),
    Column("evidence", Text, nullable=False),
    Column("f2p_pass", Integer, nullable=False),
    Column("f2p_total", Integer, nullable=False),
    Column("p2p_pass", Integer, nullable=False),
    Column("p2p_total", Integer, nullable=False),
    Column("test_map", Text, ForeignKey("artifacts.sha256"), nullable=False),
    Column("log", Text, ForeignKey("artifacts.sha256"), nullable=False),
    Column("exit_code", Integer),
    Column("grader", Text, nullable=False),
    Column("grader_version", Text, nullable=False),
    Column("task_sha256", Text, nullable=False),
    Column("eval_sha256", Text, nullable=False),
    Column("isolation", Text),
    Column("sandbox_key", Text),
    Column("flags", _Json, nullable=False),
    Column("duration_s", Float, nullable=False),
    Column("ended_at", _Ms, nullable=False),
    Column("error_class", Text),
    Column("error_text", Text),
    UniqueConstraint("rollout_id", "patch_sha256", "grader_digest", "run_no"),
    CheckConstraint(_one_of("reason", ("first", "regrade")), name="reason"),
    CheckConstraint("mask_sample = 0 OR reward IS NULL", name="no_masked_number"),
    CheckConstraint("verdict = 1 OR reward IS NULL", name="no_reward_without_verdict"),
)
_FIRST = text("reason = 'first' AND verdict = 1")
Index(
    "ux_grades_first_verdict",
    grades.c.rollout_id,
    grades.c.patch_sha256,
    grades.c.grader_digest,
    unique=True,
    sqlite_where=_FIRST,
    postgresql_where=_FIRST,
)

rewards = Table(
    "rewards",
    metadata,
    Column("rollout_id", Text, ForeignKey("rollouts.id"), primary_key=True),
    Column("grade_id", Text, ForeignKey("grades.grade_id"), nullable=False),
    Column("reward", Float),
    Column("valid", Integer, nullable=False),
    Column("invalid_reason", Text),
    Column("reward_fn_version", Text, nullable=False),
    Column("outcome_table", Integer, nullable=False),
    Column("stats", Text, nullable=False),
    Column("stats_sha256", Text, nullable=False),
    Column("at", _Ms, nullable=False),
    CheckConstraint("(valid = 1) = (reward IS NOT NULL)", name="valid"),
    CheckConstraint("(valid = 1) = (invalid_reason IS NULL)", name="invalid_reason"),
)

deliveries = Table(
    "deliveries",
    metadata,
    Column("delivery_id", Text, primary_key=True),
    Column("rollout_id", Text, ForeignKey("rollouts.id"), nullable=False),
    Column("at", _Ms, nullable=False),
    Column("session_ref", Text),
    Column("policy_version", Text),
    Column("kind", Text, nullable=False),
    Column("value", Float),
    Column("exception", Text),
    CheckConstraint(_one_of("kind", ("value", "none", "exception")), name="kind"),
    CheckConstraint("(kind = 'value') = (value IS NOT NULL)", name="value"),
    CheckConstraint("(kind = 'exception') = (exception IS NOT NULL)", name="exception"),
)
Index("ix_deliveries_rollout", deliveries.c.rollout_id)
