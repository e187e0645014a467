"""Runs migrations on a connection that the store hands over, so that no file holds a database URL."""

from __future__ import annotations

from alembic import context

from store import schema

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=schema.metadata,
    render_as_batch=True,
    transaction_per_migration=False,
)
context.run_migrations()
