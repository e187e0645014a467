"""The schema's history: where a database stands, and how it is brought forward."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from store import errors
from store.dialect import Dialect

if TYPE_CHECKING:
    from collections.abc import Sequence

MIGRATIONS = Path(__file__).resolve().parent.parent / "migrations"


def upgrade(connection: sa.Connection, to: str = "head") -> None:
    """Run the migrations that are missing, in the transaction of `connection`.

    Raises `StoreUnusable` when the database is too new for this program, and before a migration that takes something
    away from running programs while a rollout is held.
    """
    at = standing(connection)
    if at is not None and at >= newest():
        return
    from alembic import command

    config = _config(connection)
    _check_unheld(connection, config, at)
    command.upgrade(config, to)


def standing(connection: sa.Connection) -> str | None:
    """Return the revision the database is at, None for an empty one.

    It may be newer than this program, as migrations only add, up to one that says otherwise in `schema_meta.min_code`;
    raises `StoreUnusable` from there on.
    """
    at = current(connection)
    if at is None or at in known():
        return at
    oldest = connection.exec_driver_sql("SELECT value FROM schema_meta WHERE key = 'min_code'").scalar()
    if oldest is None or str(oldest) > newest():
        raise errors.StoreUnusable(
            f"the database is at schema {at}, newer than this program's {newest()} and closed to it",
            hint="update the program",
        )
    return at


def _check_unheld(connection: sa.Connection, config: Any, at: str | None) -> None:  # noqa: ANN401 - see `_config`
    """Refuse a migration that declares `additive = False` while somebody works by the schema of before."""
    from alembic.script import ScriptDirectory

    missing = [
        r for r in ScriptDirectory.from_config(config).walk_revisions() if at is not None and r.revision > at
    ]
    breaking = [r.revision for r in missing if not getattr(r.module, "additive", True)]
    if not breaking:
        return
    now = Dialect.named(connection.dialect.name).now_sql
    held = connection.exec_driver_sql(f"SELECT count(*) FROM rollouts WHERE lease_until > {now}").scalar_one()
    if held:
        raise errors.StoreUnusable(
            f"migration {min(breaking)} changes what running programs rely on, and {held} rollouts are held",
            hint="let the workers finish or stop them, then `rollouts clean`, then repeat",
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
