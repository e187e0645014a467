"""The door for people's SQL: reads everything, changes nothing, ends in time. The engine enforces it, not a parser."""

from __future__ import annotations

import queue
import sqlite3
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import psycopg
import sqlalchemy as sa

from store import engine, errors, place

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


MAX_BYTES = 64_000_000
"""Of a whole answer."""
VALUE_BYTES = 10_000_000
"""Of a single value in SQLite."""
_COLUMNS = 256
_PATTERN = 1_000
"""Characters of a LIKE or GLOB pattern, which SQLite matches without looking up."""
_GRACE_S = 1.0


@dataclass(frozen=True, slots=True)
class QueryResult:
    """Rows of a person's query; `cut` says that a limit left some out, `too_large` that it was the one on bytes."""

    columns: list[str]
    rows: list[tuple[Any, ...]]
    cut: bool
    too_large: bool = False


_READS = frozenset(
    {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
)
_FORBIDDEN_FUNCTIONS = frozenset({"load_extension", "writefile", "edit", "fts3_tokenizer"})


def sqlite(url: sa.URL, query: str, limit: int, timeout_s: float) -> QueryResult:
    """Ask a SQLite file; blocks for the time limit and a second more at most.

    A function that does not hear the interrupt is left behind on a thread that does not keep the process alive.
    """
    connection = sqlite3.connect(
        place.file_of(url).as_uri() + "?mode=ro", uri=True, check_same_thread=False, timeout=timeout_s
    )
    _limit(connection)
    answered: queue.SimpleQueue[QueryResult | Exception] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answered.put(_read(connection.execute(query), limit))
        except Exception as e:  # noqa: BLE001 - the thread's boundary: the asker raises it
            answered.put(e)
        finally:
            connection.close()

    threading.Thread(target=ask, name="question", daemon=True).start()
    try:
        found = answered.get(timeout=timeout_s)
    except queue.Empty:
        with suppress(sqlite3.ProgrammingError):  # it ended just now and is closed
            connection.interrupt()
        with suppress(queue.Empty):
            answered.get(timeout=_GRACE_S)
        raise _too_long(timeout_s) from None
    if isinstance(found, sqlite3.Error | sqlite3.Warning):
        why = "only SELECT is allowed here" if "authoriz" in str(found) else str(found)
        raise errors.StoreUnusable(
            f"the query was refused: {why}", hint="see the tables with `rollouts sql --schema`"
        ) from found
    if isinstance(found, Exception):
        raise found
    return found


def _limit(connection: sqlite3.Connection) -> None:
    def authorise(action: int, _one: str | None, two: str | None, _db: str | None, _by: str | None) -> int:
        if action == sqlite3.SQLITE_FUNCTION and two in _FORBIDDEN_FUNCTIONS:
            return sqlite3.SQLITE_DENY
        return sqlite3.SQLITE_OK if action in _READS else sqlite3.SQLITE_DENY

    connection.set_authorizer(authorise)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, VALUE_BYTES)
    connection.setlimit(sqlite3.SQLITE_LIMIT_COLUMN, _COLUMNS)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, _PATTERN)


def _read(cursor: sqlite3.Cursor, limit: int) -> QueryResult:
    if cursor.description is None:
        raise _nothing_asked()
    return _within(cursor, [column[0] for column in cursor.description], limit)


def _within(rows: Iterable[tuple[Any, ...]], columns: list[str], limit: int) -> QueryResult:
    """Take rows up to both limits; the first row comes whatever its size."""
    kept: list[tuple[Any, ...]] = []
    size = 0
    for row in rows:
        size += sum(len(value) if isinstance(value, str | bytes) else 8 for value in row)
        if len(kept) == limit or (kept and size > MAX_BYTES):
            return QueryResult(columns=columns, rows=kept, cut=True, too_large=len(kept) < limit)
        kept.append(row)
    return QueryResult(columns=columns, rows=kept, cut=False)


def _nothing_asked() -> errors.StoreUnusable:
    return errors.StoreUnusable("the query asks for nothing", hint="give one SELECT")


def postgresql(url: sa.URL, query: str, limit: int, timeout_s: float) -> QueryResult:
    """Ask PostgreSQL inside a read-only transaction; blocks.

    The query becomes a cursor's, which can only be a SELECT or VALUES (a read-only transaction alone would still run
    COPY into files and programs), and the extended protocol takes one statement only.
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
            with raw.cursor(binary=True) as declaring, raw.cursor() as cursor:
                declaring.execute(b"DECLARE question NO SCROLL CURSOR FOR " + query.encode())
                fetched = _fetched(cursor, timeout_s)
                first = next(fetched)
                columns = [column.name for column in cursor.description or ()]
                found = _within(chain(first, chain.from_iterable(fetched)), columns, limit)
            connection.rollback()
    except (psycopg.Error, sa.exc.DBAPIError) as e:
        raise _refusal(e, query, timeout_s) from e
    finally:
        asking.dispose()
    return found


def _fetched(cursor: psycopg.Cursor[tuple[Any, ...]], timeout_s: float) -> Iterator[list[tuple[Any, ...]]]:
    """Yield the answer in parts, so that a large one is never here as a whole."""
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        part = cursor.execute(_FETCH).fetchall()
        yield part
        if not part:
            return
    raise _too_long(timeout_s)


_FETCH = b"FETCH FORWARD 100 FROM question"


def _refusal(error: psycopg.Error | sa.exc.DBAPIError, query: str, timeout_s: float) -> errors.StoreUnusable:
    if isinstance(error, psycopg.errors.QueryCanceled):
        return _too_long(timeout_s)
    if isinstance(error, psycopg.errors.SyntaxError) and not query.strip(" ;\n\t"):
        return _nothing_asked()
    why = str(error).splitlines()[0]
    if isinstance(error, psycopg.errors.SyntaxError | psycopg.errors.ReadOnlySqlTransaction):
        why += ": only SELECT is allowed here"
    return errors.StoreUnusable(
        f"the query was refused: {why}", hint="see the tables with `rollouts sql --schema`"
    )


def _too_long(timeout_s: float) -> errors.StoreUnusable:
    return errors.StoreUnusable(
        f"the query took longer than {timeout_s:g} s", hint="narrow it, or raise --timeout"
    )
