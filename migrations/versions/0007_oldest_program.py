"""Which programs may write: those that know at least the revision in `schema_meta.min_code`.

A later migration that takes something away from them raises it, and declares `additive = False`.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Name this revision: earlier programs do not know the key and refuse a newer schema anyway."""
    meta = sa.table("schema_meta", sa.column("key"), sa.column("value"))
    op.execute(sa.insert(meta).values(key="min_code", value=revision))
