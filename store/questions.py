"""The door for people's SQL: reads everything, changes nothing, ends in time. The engine enforces it, not a parser."""

from __future__ import annotations

import sqlite3
import time
from dataclasses import dataclass
from typing import Any

import psycopg
import sqlalchemy as sa

from store import engine, errors, place


@dataclass(frozen=True, slots=True)
class QueryResult:
    """Rows of a person's query; `cut` says that the row limit left some out."""

    columns: list[str]
    rows: list[tuple[Any, ...]]
    cut: bool


_READS = frozenset(
    {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
)
_FORBIDDEN_FUNCTIONS = frozenset({"load_extension", "writefile", "edit", "fts3_tokenizer"})


def sqlite(url: sa.URL, query: str, limit: int, timeout_s: float) -> QueryResult:
    """Ask a SQLite file; blocks."""
    deadline = time.monotonic() + timeout_s

    def authorise(action: int, _one: str | None, two: str | None, _db: str | None, _by: str | None) -> int:
        if action == sqlite3.SQLITE_FUNCTION and two in _FORBIDDEN_FUNCTIONS:
            return sqlite3.SQLITE_DENY
        return sqlite3.SQLITE_OK if action in _READS else sqlite3.SQLITE_DENY

    connection = sqlite3.connect(place.file_of(url).as_uri() + "?mode=ro", uri=True)
    try:
        connection.set_authorizer(authorise)
        connection.set_progress_handler(lambda: int(time.monotonic() > deadline), 10_000)
        cursor = connection.execute(query)
        found = cursor.fetchmany(limit + 1)
        columns = [column[0] for column in cursor.description or ()]
    except (sqlite3.Error, sqlite3.Warning) as e:
        if "interrupted" in str(e):
            raise _too_long(timeout_s) from e
        why = "only SELECT is allowed here" if "authoriz" in str(e) else str(e)
        raise errors.StoreUnusable(
            f"the query was refused: {why}", hint="see the tables with `rollouts sql --schema`"
        ) from e
    finally:
        connection.close()
    return QueryResult(columns=columns, rows=found[:limit], cut=len(found) > limit)


def postgresql(url: sa.URL, query: str, limit: int, timeout_s: float) -> QueryResult:
    """Ask PostgreSQL inside a read-only transaction; blocks.

    The binary protocol takes one statement only, so that a query cannot end the transaction and go on.
    """
    asking = sa.create_engine(
        engine.plain(url), poolclass=sa.pool.NullPool, connect_args=engine.postgresql_arguments(url)
    )
    try:
        with asking.connect() as connection, connection.begin():
            connection.exec_driver_sql("SET TRANSACTION READ ONLY")
            connection.exec_driver_sql(f"SET LOCAL statement_timeout = {round(timeout_s * 1000)}")
            raw = connection.connection.dbapi_connection
            if not isinstance(raw, psycopg.Connection):
                raise TypeError("the driver is not psycopg")
            with raw.cursor(binary=True) as cursor:
                cursor.execute(query)
                found = cursor.fetchmany(limit + 1) if cursor.description else []
                columns = [column.name for column in cursor.description or ()]
            connection.rollback()
    except psycopg.errors.QueryCanceled as e:
        raise _too_long(timeout_s) from e
    except psycopg.errors.ReadOnlySqlTransaction as e:
        raise errors.StoreUnusable("the query was refused: only SELECT is allowed here") from e
    except (psycopg.Error, sa.exc.DBAPIError) as e:
        raise errors.StoreUnusable(f"the query was refused: {str(e).splitlines()[0]}") from e
    finally:
        asking.dispose()
    return QueryResult(columns=columns, rows=found[:limit], cut=len(found) > limit)


def _too_long(timeout_s: float) -> errors.StoreUnusable:
    return errors.StoreUnusable(
        f"the query took longer than {timeout_s:g} s", hint="narrow it, or raise --timeout"
    )
