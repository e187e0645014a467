"""The schema's history: where a database stands, and how it is brought forward."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from store import errors

if TYPE_CHECKING:
    from collections.abc import Sequence

MIGRATIONS = Path(__file__).resolve().parent.parent / "migrations"


def upgrade(connection: sa.Connection, to: str = "head") -> None:
    """Run the migrations that are missing, in the transaction of `connection`.

    Raises `StoreUnusable` when the database is newer than this program.
    """
    at = current(connection)
    if at == newest():
        return
    check_known(at)
    from alembic import command

    command.upgrade(_config(connection), to)


def check_known(at: str | None) -> None:
    """Raise `StoreUnusable` for a revision that this program has never heard of."""
    if at is not None and at not in known():
        raise errors.StoreUnusable(
            f"the database is at schema {at}, newer than this program's {newest()}", hint="update the program"
        )


def current(connection: sa.Connection) -> str | None:
    """Return the schema revision a database is at, None for an empty one."""
    if not sa.inspect(connection).has_table("alembic_version"):
        return None
    found = connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar()
    return None if found is None else str(found)


def known() -> Sequence[str]:
    """Return every revision of this program, oldest first (file names begin with it)."""
    return sorted(p.name.split("_", 1)[0] for p in (MIGRATIONS / "versions").glob("[0-9]*.py"))


def newest() -> str:
    """Return the revision this program's migrations lead to."""
    return known()[-1]


def _config(connection: sa.Connection) -> Any:  # noqa: ANN401 - alembic is imported only where a migration runs
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["connection"] = connection
    return config
