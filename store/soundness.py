"""Is a database as this program's schema declares it, guards included, and is its file whole? And bringing it forward."""

from __future__ import annotations

import sqlite3
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from store import engine, place, revisions, schema, triggers

if TYPE_CHECKING:
    from collections.abc import Iterator


_VIEWS = {"sandbox_ledger", "sandbox_leaks", "deliveries_v", "group_outcomes"}
"""For people's SQL; made by the migrations."""


def standing(url: str) -> str | None:
    """Return the revision an existing database is at, None for an empty one.

    Raises `StoreUnusable` when there is no such database or a newer program made it, `StoreUnreachable` when it does
    not answer.
    """
    with _reading(url) as connection:
        return revisions.standing(connection)


def bring_forward(url: str, edges: set[tuple[str, str, str]], *, store_uuid: str) -> str | None:
    """Create the database or run the migrations it lacks; return the revision it was at, None for a new one.

    `edges` and `store_uuid` as for `Store.open`. Raises `StoreUnusable` or `StoreUnreachable`.
    """
    parsed = engine.parse_url(url)
    is_new = parsed.get_backend_name() == "sqlite" and not place.file_of(parsed).exists()
    before = None if is_new else standing(url)
    engine.prepare(parsed, edges, store_uuid=store_uuid)
    return before


def complaints(url: str) -> list[str]:
    """Return what is wrong with a database, each as a sentence; raises like `standing`.

    Reads every page of a SQLite file.
    """
    with _reading(url) as connection:
        found = list(_damage(connection))
        if found:
            return found
        at, newest = revisions.standing(connection), revisions.newest()
        if at is None or at < newest:
            return [
                f"the schema is at {at or 'none'}, behind this program's {newest}: run `rollouts db upgrade`"
            ]
        if at > newest:
            return [
                f"the schema is at {at}, newer than this program's {newest}: check it with the newer program"
            ]
        return [
            *_differences(connection),
            *_missing_checks(connection),
            *_missing_guards(connection),
            *_missing_views(connection),
        ]


@contextmanager
def _reading(url: str) -> Iterator[sa.Connection]:
    """Yield a connection that can neither write nor make a file; a driver's error comes out as the store's own."""
    parsed = engine.parse_url(url)
    if parsed.get_backend_name() == "sqlite":
        file = place.file_of(parsed)
        place.check(file, create=False)
        looking = sa.create_engine(
            "sqlite://",
            creator=lambda: sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True),
            poolclass=sa.pool.NullPool,
        )
    else:
        looking = sa.create_engine(
            engine.plain(parsed),
            connect_args=engine.postgresql_arguments(parsed),
            poolclass=sa.pool.NullPool,
            execution_options={"postgresql_readonly": True},
        )
    try:
        with looking.connect() as connection:
            yield connection
    except sa.exc.DBAPIError as e:
        raise engine.explained(e, parsed) from e


def _damage(connection: sa.Connection) -> Iterator[str]:
    if connection.dialect.name != "sqlite":
        return
    try:
        for (line,) in connection.exec_driver_sql("PRAGMA integrity_check").fetchall():
            if line != "ok":
                yield f"the file is damaged: {line}"
        for table, rowid, parent, _ in connection.exec_driver_sql("PRAGMA foreign_key_check").fetchall():
            yield f"row {rowid} of {table} names a row of {parent} that does not exist"
    except sa.exc.DatabaseError as e:
        if getattr(e.orig, "sqlite_errorname", "") != "SQLITE_CORRUPT":
            raise
        yield f"the file is damaged: {e.orig}"


def _differences(connection: sa.Connection) -> Iterator[str]:
    """Tables, columns, keys and indexes that are missing or differ; what somebody added is theirs."""
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    for found in compare_metadata(MigrationContext.configure(connection), schema.metadata):
        for what, *about in found if isinstance(found, list) else [found]:
            if what.startswith("add_"):
                yield f"{what.removeprefix('add_')} {_name(about[-1])} is missing"
            elif what.startswith("modify_"):
                yield f"column {about[1]}.{about[2]} differs in its {what.removeprefix('modify_')}"


def _name(item: Any) -> str:  # noqa: ANN401 - tables, columns, constraints and indexes alike
    table = getattr(item, "table", None)
    return (
        f"{table.name}.{item.name}" if isinstance(item, sa.Column) and table is not None else str(item.name)
    )


def _missing_checks(connection: sa.Connection) -> Iterator[str]:
    """Conditions on rows and of partial indexes, which a comparison of metadata does not see."""
    looked = sa.inspect(connection)
    where = f"{connection.dialect.name}_where"
    for table in schema.metadata.sorted_tables:
        wanted = {str(c.name) for c in table.constraints if isinstance(c, sa.CheckConstraint)}
        there = {str(c["name"]) for c in looked.get_check_constraints(table.name)}
        for name in sorted(wanted - there):
            yield f"check {name} is missing"
        partial = {
            i["name"]: where in (i.get("dialect_options") or {}) for i in looked.get_indexes(table.name)
        }
        for index in table.indexes:
            declared = index.dialect_options[connection.dialect.name].get("where") is not None
            if partial.get(index.name, declared) != declared:
                yield f"index {index.name} covers other rows than declared"


_POSTGRESQL_TRIGGERS = """SELECT t.tgname, pg_get_triggerdef(t.oid, true), pg_get_functiondef(t.tgfoid) FROM pg_trigger AS t
  JOIN pg_class AS c ON c.oid = t.tgrelid
  WHERE NOT t.tgisinternal AND t.tgenabled IN ('O', 'A') AND c.relnamespace = current_schema()::regnamespace"""


def _missing_views(connection: sa.Connection) -> Iterator[str]:
    there = set(sa.inspect(connection).get_view_names())
    for name in sorted(_VIEWS - there):
        yield f"view {name} is missing"


def _missing_guards(connection: sa.Connection) -> Iterator[str]:
    if connection.dialect.name == "sqlite":
        query = "SELECT name, sql FROM sqlite_master WHERE type = 'trigger'"
        there = {str(name): [str(text)] for name, text in connection.exec_driver_sql(query)}
    else:
        query = _POSTGRESQL_TRIGGERS
        there = {str(name): [str(a), str(b)] for name, a, b in connection.exec_driver_sql(query)}
    for guard in triggers.GUARDS:
        if guard.name not in there:
            yield f"guard {guard.name} ({guard.message}) is missing"
        elif not _is_guard(connection.dialect.name, guard, there[guard.name]):
            yield f"guard {guard.name} is not as declared"


def _is_guard(dialect: str, guard: triggers.Guard, texts: list[str]) -> bool:
    if dialect == "sqlite":
        return texts == [triggers.sqlite(guard)]
    declared, how = triggers.postgresql(guard)
    trigger, function = texts
    return declared.split("$guard$")[1] in function and trigger == how
