"""What was handed back to callers, and two views over it: every hand-over, and what each group of samples came to."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_DELIVERIES = """CREATE VIEW deliveries_v AS
SELECT d.delivery_id, d.at, d.rollout_id, r.run_id, r.group_id, r.instance_id, r.sample, r.state, d.kind, d.value,
  w.reward AS stored_reward, w.valid, g.outcome AS grade_outcome, g.mask_sample, r.failure_class, d.exception,
  d.session_ref, d.policy_version
FROM deliveries AS d JOIN rollouts AS r ON r.id = d.rollout_id
LEFT JOIN rewards AS w ON w.rollout_id = r.id
LEFT JOIN grades AS g ON g.grade_id = w.grade_id
WHERE NOT EXISTS (SELECT 1 FROM deliveries AS x WHERE x.delivery_id = d.delivery_id || '-withdrawn')"""
"""A caller that was cancelled while it was handed a value got none, which a second row says."""

_GROUPS = """CREATE VIEW group_outcomes AS
SELECT s.run_id, s.group_id, s.instance_id, count(*) AS rollouts, sum(s.valid) AS valid, sum(s.masked) AS masked,
  sum(s.dropped) AS dropped, sum(s.unfinished) AS unfinished, sum(s.rerolled) AS rerolled,
  sum(s.delivered) AS delivered, avg(s.reward) AS mean_reward,
  CASE WHEN sum(s.delivered) = count(*) THEN 1 ELSE 0 END AS usable
FROM (
  SELECT r.run_id, r.group_id, r.instance_id, w.reward,
    CASE WHEN w.valid = 1 THEN 1 ELSE 0 END AS valid,
    CASE WHEN w.valid = 0 THEN 1 ELSE 0 END AS masked,
    CASE WHEN r.state = 'failed' THEN 1 ELSE 0 END AS dropped,
    CASE WHEN r.state <> 'failed' AND w.rollout_id IS NULL THEN 1 ELSE 0 END AS unfinished,
    CASE WHEN r.parent_id IS NULL THEN 0 ELSE 1 END AS rerolled,
    CASE WHEN EXISTS (SELECT 1 FROM deliveries AS d WHERE d.rollout_id = r.id AND d.kind = 'value'
      AND NOT EXISTS (SELECT 1 FROM deliveries AS x WHERE x.delivery_id = d.delivery_id || '-withdrawn'))
      THEN 1 ELSE 0 END
      AS delivered
  FROM rollouts AS r LEFT JOIN rewards AS w ON w.rollout_id = r.id
) AS s
GROUP BY s.run_id, s.group_id, s.instance_id"""
"""A trainer that drops a group whole when one sample of it is missing consumed the groups that are `usable`."""


def upgrade() -> None:
    """Create the table, its guards and the views."""
    op.create_table(
        "deliveries",
        sa.Column("delivery_id", sa.Text(), nullable=False),
        sa.Column("rollout_id", sa.Text(), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.Column("session_ref", sa.Text(), nullable=True),
        sa.Column("policy_version", sa.Text(), nullable=True),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("value", sa.Float(), nullable=True),
        sa.Column("exception", sa.Text(), nullable=True),
        sa.CheckConstraint("kind IN ('value', 'none', 'exception')", name=op.f("ck_deliveries_kind")),
        sa.CheckConstraint("(kind = 'value') = (value IS NOT NULL)", name=op.f("ck_deliveries_value")),
        sa.CheckConstraint(
            "(kind = 'exception') = (exception IS NOT NULL)", name=op.f("ck_deliveries_exception")
        ),
        sa.ForeignKeyConstraint(["rollout_id"], ["rollouts.id"], name=op.f("fk_deliveries_rollout_id")),
        sa.PrimaryKeyConstraint("delivery_id", name=op.f("pk_deliveries")),
    )
    op.create_index("ix_deliveries_rollout", "deliveries", ["rollout_id"])
    _refuse("deliveries_no_update", "UPDATE", "deliveries is append-only")
    _refuse("deliveries_no_delete", "DELETE", "deliveries keeps its rows")
    op.execute(_DELIVERIES)
    op.execute(_GROUPS)


def _refuse(name: str, event: str, message: str) -> None:
    if op.get_bind().dialect.name == "sqlite":
        op.execute(
            f"CREATE TRIGGER {name} BEFORE {event} ON deliveries BEGIN SELECT RAISE(ABORT, '{message}'); END"
        )
        return
    back = "OLD" if event == "DELETE" else "NEW"
    op.execute(
        f"CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $guard$ BEGIN"
        f" IF true THEN RAISE EXCEPTION '{message}' USING ERRCODE = 'integrity_constraint_violation';"
        f" END IF; RETURN {back}; END $guard$"
    )
    op.execute(f"CREATE TRIGGER {name} BEFORE {event} ON deliveries FOR EACH ROW EXECUTE FUNCTION {name}()")
