"""An attempt says when its agent was about to ask the model: a caller's session must not be sampled twice."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the time; of older attempts it is not known, and their recorded calls say as much as there is."""
    op.add_column("attempts", sa.Column("asked_at", sa.BigInteger()))
