"""A mark per worker in every batch of writes, so that a commit whose answer was lost can be looked up."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the number of the last batch that a worker committed."""
    op.add_column("workers", sa.Column("last_batch", sa.BigInteger(), server_default="0", nullable=False))
