"""A move costs less: no index holds the state, and PostgreSQL looks edges up once per statement, not once per row."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_UNFINISHED = sa.text("finished_at IS NULL")

_EDGE_FUNCTION = """CREATE FUNCTION rollouts_edge() RETURNS trigger LANGUAGE plpgsql AS $guard$ BEGIN\
 IF EXISTS (SELECT 1 FROM became LEFT JOIN was ON was.id = became.id WHERE was.id IS NULL OR\
 became.state <> was.state AND NOT EXISTS\
 (SELECT 1 FROM fsm_edges WHERE src = was.state AND dst = became.state))\
 THEN RAISE EXCEPTION 'the state machine has no such edge' USING ERRCODE = 'integrity_constraint_violation';\
 END IF; RETURN NULL; END $guard$"""

_EDGE_TRIGGER = """CREATE TRIGGER rollouts_edge AFTER UPDATE ON rollouts\
 REFERENCING OLD TABLE AS was NEW TABLE AS became FOR EACH STATEMENT EXECUTE FUNCTION rollouts_edge()"""


def upgrade() -> None:
    """Replace the index of live rollouts, and PostgreSQL's guard of edges."""
    op.drop_index("ix_rollouts_live", "rollouts")
    op.create_index(
        "ix_rollouts_unfinished",
        "rollouts",
        ["not_before", "id"],
        sqlite_where=_UNFINISHED,
        postgresql_where=_UNFINISHED,
    )
    if op.get_bind().dialect.name == "postgresql":
        op.execute(
            "ALTER TABLE rollouts SET (fillfactor = 60)"
        )  # room for new versions of rows on their pages
        op.execute("DROP TRIGGER rollouts_edge ON rollouts")
        op.execute("DROP FUNCTION rollouts_edge()")
        op.execute(_EDGE_FUNCTION)
        op.execute(_EDGE_TRIGGER)
