"""Two views over the sandbox ledger: its sum, and what nobody answers for."""

from __future__ import annotations

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_NOW = {
    "sqlite": "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)",
    "postgresql": "CAST(extract(epoch FROM clock_timestamp()) * 1000 AS bigint)",
}

_LEDGER = """CREATE VIEW sandbox_ledger AS
SELECT provider, provider_ref, count(*) AS intents,
  sum(CASE WHEN status = 'released' THEN 1 ELSE 0 END) AS released,
  sum(CASE WHEN status = 'lost' THEN 1 ELSE 0 END) AS lost,
  sum(CASE WHEN status IN ('intent', 'live', 'releasing') THEN 1 ELSE 0 END) AS open
FROM sandboxes GROUP BY provider, provider_ref"""

_LEAKS = """CREATE VIEW sandbox_leaks AS
SELECT s.key, s.rollout_id, s.role, s.provider, s.provider_ref, s.provider_ids, s.status, s.intent_at, s.expires_at,
  s.release_attempts, s.last_error
FROM sandboxes AS s
WHERE s.status IN ('intent', 'live', 'releasing')
  AND NOT EXISTS (SELECT 1 FROM rollouts AS r WHERE r.id = s.rollout_id AND r.state NOT IN ('released', 'failed')
    AND r.lease_until > {now})
  AND NOT (s.rollout_id IS NULL AND EXISTS (SELECT 1 FROM workers AS w
    WHERE replace(w.worker_id, '-', '') = substr(s.key, 13, 32) AND w.stopping = 0
      AND w.heartbeat_at > {now} - 180000))"""
"""A sandbox of no rollout belongs to the worker that its key names, for as long as that renews its sign of life."""


def upgrade() -> None:
    """Create both views."""
    op.execute(_LEDGER)
    op.execute(_LEAKS.format(now=_NOW[op.get_bind().dialect.name]))
