"""What differs between the two engines, in one place; everything else in the store is the same SQL for both."""

from __future__ import annotations

import re
import sqlite3
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert as postgresql_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

SQLITE_NOW = "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)"
"""Epoch milliseconds; `unixepoch('subsec')` is NULL before SQLite 3.42."""

BEGIN = "BEGIN IMMEDIATE"
"""A deferred transaction that reads and then writes may be refused at once, however long it would wait."""

POSTGRESQL_NOW = "CAST(extract(epoch FROM clock_timestamp()) * 1000 AS bigint)"
"""Epoch milliseconds; `now()` would stand still inside a transaction."""

_PARAMETER = re.compile(r"(?<!:):(\w+)")
_TYPES = {int: "bigint", str: "text", dict: "jsonb"}


@dataclass(frozen=True, slots=True)
class Dialect:
    """One engine's ways. `now_sql` gives epoch milliseconds of the database's clock."""

    name: str
    now_sql: str

    @classmethod
    def of(cls, url: sa.URL, now_sql: str | None = None) -> Dialect:
        """Return the dialect of a URL; tests may put their own clock into SQL."""
        return cls.named(url.get_backend_name(), now_sql)

    @classmethod
    def named(cls, name: str, now_sql: str | None = None) -> Dialect:
        """Return the dialect that SQLAlchemy calls so."""
        return cls(name, now_sql or (SQLITE_NOW if name == "sqlite" else POSTGRESQL_NOW))

    @property
    def now(self) -> sa.ColumnElement[int]:
        """The database's clock as an expression."""
        return sa.literal_column(self.now_sql, sa.BigInteger)

    def insert_missing(self, table: sa.Table) -> Any:  # noqa: ANN401 - each engine has an insert type of its own
        """Return an INSERT that leaves existing rows alone."""
        make = sqlite_insert if self.name == "sqlite" else postgresql_insert
        return make(table).on_conflict_do_nothing()

    def rows_of(self, columns: Mapping[str, type]) -> str:
        """Return a FROM item `item` whose rows are the JSON array bound as `:items` (objects with these keys)."""
        if self.name == "sqlite":
            picked = ", ".join(f"json_extract(value, '$.{name}') AS {name}" for name in columns)
            return f"(SELECT {picked} FROM json_each(:items)) AS item"
        typed = ", ".join(f"{name} {_TYPES[kind]}" for name, kind in columns.items())
        return f"json_to_recordset(CAST(:items AS json)) AS item({typed})"

    def run(
        self, connection: sa.Connection, statement: str, parameters: dict[str, Any]
    ) -> Sequence[Sequence[Any]]:
        """Run a hot statement, made by `driver_sql`, and return its rows; errors are SQLAlchemy's."""
        if self.name == "sqlite":
            return run_sqlite(connection, statement, parameters)
        done = connection.exec_driver_sql(statement, parameters)
        return done.fetchall() if done.returns_rows else []

    @contextmanager
    def transaction(self, connection: sa.Connection) -> Iterator[None]:
        """Commit at the end. After an error the connection is of no more use, and gives up the rest by being closed."""
        if self.name != "sqlite":
            with connection.begin():
                yield
            return
        run_sqlite(connection, BEGIN, {})
        yield
        run_sqlite(connection, "COMMIT", {})
        if (
            connection.in_transaction()
        ):  # a statement that went SQLAlchemy's way let it believe that it had begun one
            connection.commit()

    def driver_sql(self, text: str) -> str:
        """Return SQL with `:name` parameters as the driver takes it: for statements too hot to be compiled each time."""
        return text if self.name == "sqlite" else _PARAMETER.sub(r"%(\1)s", text.replace("%", "%%"))

    @property
    def lock_rows(self) -> str:
        """Return what a SELECT of rows about to change ends with (SQLite's transaction holds the only lock already)."""
        return "" if self.name == "sqlite" else " FOR UPDATE"

    @property
    def skip_locked(self) -> str:
        """Return what a claim's SELECT ends with."""
        return "" if self.name == "sqlite" else " FOR UPDATE SKIP LOCKED"


def run_sqlite(
    connection: sa.Connection, statement: str, parameters: dict[str, Any]
) -> Sequence[Sequence[Any]]:
    """Run a statement on SQLite's own connection: a lone write pays more for SQLAlchemy's way there than for itself."""
    raw: Any = connection.connection.driver_connection
    try:
        rows: list[tuple[Any, ...]] = raw.execute(statement, parameters).fetchall()
    except sqlite3.Error as e:
        raise sa.exc.DBAPIError.instance(
            statement, parameters, e, sqlite3.Error, dialect=connection.dialect
        ) from e
    return rows


_SQLITE_TROUBLE = (
    "SQLITE_BUSY",
    "SQLITE_LOCKED",
    "SQLITE_FULL",
    "SQLITE_IOERR",
    "SQLITE_CANTOPEN",
    "SQLITE_READONLY",
)


def is_trouble(error: BaseException) -> bool:
    """Say whether an error is about reaching the database or its disk, so that trying again later may help."""
    if not isinstance(error, sa.exc.DBAPIError):
        return False
    name = getattr(error.orig, "sqlite_errorname", None)
    if name is not None:
        return str(name).startswith(_SQLITE_TROUBLE)
    return error.connection_invalidated or isinstance(error, sa.exc.OperationalError | sa.exc.InterfaceError)
