"""Opening a database: the URL rule, the engines with their settings, the checks that refuse an unusable one.

Writers use synchronous engines of one connection each; readers an async one that cannot write. On PostgreSQL no session
state is used, so that a pooler in transaction mode may stand in between.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from contextlib import AbstractContextManager, closing, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from store import errors, place, revisions, schema
from store.dialect import BEGIN, Dialect, run_sqlite

if TYPE_CHECKING:
    from collections.abc import Callable


class Ticket(Protocol):
    """Gives a thread its turn at a database; see `place.Turns`."""

    def __call__(self, given_up: Callable[[], bool], /) -> AbstractContextManager[None]: ...
    def close(self) -> None: ...


OPEN_PATIENCE_S = 60.0
"""How long an open waits for a database that somebody keeps or that does not take writes."""
BUSY_MS = 30_000
WRITER_BUSY_MS = 1_000
"""How long one try of a writer waits inside SQLite; it tries again itself, and must hear a close in between."""
_CONNECT_S = 10
_FIRST_OPEN_LOCK = 0x726F6C6C
"""Key of the PostgreSQL advisory lock that serialises first opens."""


def parse_url(url: str) -> sa.URL:
    """Return the SQLAlchemy URL of a database: a SQLite file or PostgreSQL (through psycopg 3).

    Raises `StoreUnusable` for anything else.
    """
    try:
        parsed = sa.make_url(url)
        backend = parsed.get_backend_name()
    except (sa.exc.ArgumentError, ValueError):
        raise errors.StoreUnusable(f"not a database URL: {_without_secret(url)!r}", hint=_FORMS) from None
    if backend in ("postgresql", "postgres"):
        return parsed.set(drivername="postgresql+psycopg")
    if backend != "sqlite":
        raise errors.StoreUnusable(f"database kind {backend!r} is not supported", hint=_FORMS)
    if not parsed.database or parsed.database == ":memory:":
        raise errors.StoreUnusable("an in-memory database would forget every rollout", hint=_FORMS)
    if parsed.query:
        raise errors.StoreUnusable(
            f"a SQLite URL takes no options, but {url!r} has some", hint="write only the path of the file"
        )
    return parsed


def _without_secret(url: str) -> str:
    """Return a text that is no URL without what stands where the password would: up to the last @."""
    head, at, tail = str(url).rpartition("@")
    scheme, separator, _ = head.partition("://")
    return f"{scheme}{separator}***@{tail}" if at and separator else f"***@{tail}" if at else tail


_FORMS = "write sqlite:///path/to/rollouts.db or postgresql://user@host/database"


def shown(url: sa.URL) -> str:
    """Return the URL for people: without its password."""
    return (
        str(place.file_of(url))
        if url.get_backend_name() == "sqlite"
        else url.render_as_string(hide_password=True)
    )


def write_engine(url: sa.URL, *, busy_ms: int = BUSY_MS) -> sa.Engine:
    """Return an engine for one thread: one connection, every commit durable."""
    if url.get_backend_name() == "sqlite":
        return _sqlite_engine(url, busy_ms)
    return sa.create_engine(
        plain(url), pool_size=1, max_overflow=0, connect_args=postgresql_arguments(url), json_serializer=_json
    )


def _sqlite_engine(url: sa.URL, busy_ms: int) -> sa.Engine:
    engine = sa.create_engine(
        url,
        poolclass=sa.pool.SingletonThreadPool,
        connect_args={"timeout": busy_ms / 1000, "check_same_thread": False},
        json_serializer=_json,
    )

    @event.listens_for(engine, "connect")
    def _connect(connection: Any, _record: object) -> None:  # noqa: ANN401 - the DBAPI's own type
        connection.isolation_level = None
        _pragma(connection, "journal_mode", "wal")
        _pragma(connection, "synchronous", 2)
        _pragma(connection, "foreign_keys", 1)
        _pragma(connection, "busy_timeout", busy_ms)

    @event.listens_for(engine, "begin")
    def _begin(connection: sa.Connection) -> None:
        raw: Any = connection.connection.driver_connection
        if not raw.in_transaction:
            run_sqlite(connection, BEGIN, {})

    return engine


def _pragma(connection: sqlite3.Connection, name: str, value: str | int) -> None:
    connection.execute(f"PRAGMA {name} = {value}").fetchall()
    (got,) = connection.execute(f"PRAGMA {name}").fetchone()
    if got != value:
        raise errors.StoreUnusable(
            f"this SQLite would not set {name} to {value} (it stays {got})",
            hint="put the database on a local disk",
        )


class Readers:
    """The connections of one event loop, none of which can write, and a fair queue for them without a limit of time."""

    def __init__(self, url: sa.URL) -> None:
        is_file = url.get_backend_name() == "sqlite"
        number = 4 if is_file else 1  # a PostgreSQL server counts its connections
        self.places = asyncio.Semaphore(number)
        self._opened: list[Any] = []
        self.engine = _file_reader(url, number, self._opened) if is_file else _server_reader(url, number)

    async def close(self, *, loop_is_closed: bool) -> None:
        """Let go of the connections; of a closed loop only the threads that they would leave can be ended."""
        if loop_is_closed:
            await asyncio.gather(*(connection.stop() for connection in self._opened))
        await self.engine.dispose(close=not loop_is_closed)


def _server_reader(url: sa.URL, number: int) -> AsyncEngine:
    return create_async_engine(
        plain(url),
        pool_size=number,
        max_overflow=0,
        connect_args=postgresql_arguments(url),
        execution_options={"postgresql_readonly": True},
    )


def _file_reader(url: sa.URL, number: int, opened: list[Any]) -> AsyncEngine:
    engine = create_async_engine(
        url.set(drivername="sqlite+aiosqlite"),
        pool_size=number,
        max_overflow=0,
        connect_args={"timeout": BUSY_MS / 1000},
    )

    @event.listens_for(engine.sync_engine, "connect")
    def _connect(connection: Any, _record: object) -> None:  # noqa: ANN401 - the DBAPI's own type
        opened.append(connection.driver_connection)
        cursor = connection.cursor()
        cursor.execute("PRAGMA query_only = 1")
        cursor.close()

    @event.listens_for(engine.sync_engine, "close")
    def _close(connection: Any, _record: object) -> None:  # noqa: ANN401 - the DBAPI's own type
        opened.remove(connection.driver_connection)

    return engine


def plain(url: sa.URL) -> sa.URL:
    """Return the URL without the parameters that are ours."""
    return url.difference_update_query(["prepare"])


def postgresql_arguments(url: sa.URL) -> dict[str, Any]:
    """Return libpq's parameters: a dead network is noticed in seconds; statements are prepared only with `?prepare=1`."""
    return {
        "connect_timeout": _CONNECT_S,
        "tcp_user_timeout": 15_000,
        "keepalives_idle": 5,
        "keepalives_interval": 5,
        "keepalives_count": 3,
        "application_name": "rollouts",
        "prepare_threshold": 5 if url.query.get("prepare") == "1" else None,
    }


def _json(value: object) -> str:
    from store.rows import canonical_json, storable

    return canonical_json(storable(value))


def ticket(url: sa.URL) -> Ticket:
    """Return what gives one thread its turns at a SQLite file; PostgreSQL needs none."""
    return place.Turns(place.file_of(url)) if url.get_backend_name() == "sqlite" else _NoQueue()


class _NoQueue:
    def __call__(self, _given_up: Callable[[], bool], /) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        """There is nothing to let go of."""


def prepare(
    url: sa.URL,
    edges: set[tuple[str, str, str]],
    *,
    store_uuid: str,
    given_up: Callable[[], bool] = place.never,
) -> str:
    """Bring the database to the newest schema, check it, and return the store's uuid.

    The first open of many processes is serialised. Raises `StoreUnusable` for a newer schema, another state machine or
    a clock expression that does not work, `StoreUnreachable` when PostgreSQL does not answer or another process keeps
    the SQLite file for itself for longer than a minute, or until `given_up` says true.
    """
    dialect = Dialect.of(url)
    if dialect.name == "sqlite":
        place.check(place.file_of(url), create=True)
    engine = write_engine(url)
    until = time.monotonic() + OPEN_PATIENCE_S
    try:
        with (
            closing(ticket(url)) as turn,
            turn(lambda: given_up() or time.monotonic() >= until),
            engine.begin() as connection,
        ):
            if dialect.name != "sqlite":
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_FIRST_OPEN_LOCK)))
            _check_clock(connection, dialect)
            revisions.upgrade(connection)
            _check_edges(connection, edges, shown(url))
            connection.execute(
                dialect.insert_missing(schema.schema_meta), {"key": "store_uuid", "value": store_uuid}
            )
            found = connection.execute(
                sa.select(schema.schema_meta.c.value).where(schema.schema_meta.c.key == "store_uuid")
            ).scalar_one()
            return str(found)
    except sa.exc.DBAPIError as e:
        raise explained(e, url) from e
    finally:
        engine.dispose()


def explained(error: sa.exc.DBAPIError, url: sa.URL, *, opening: bool = True) -> errors.StoreError:
    """Turn a driver's error into ours: one sentence, the database without its password, the next step."""
    what = str(error.orig).strip().splitlines()[0] if str(error.orig).strip() else type(error.orig).__name__
    if url.get_backend_name() != "sqlite":
        kind = errors.NeverReached if opening else errors.StoreUnreachable
        return kind(
            f"cannot use {shown(url)}: {what}", hint="check address, user, password and that the server runs"
        )
    if getattr(error.orig, "sqlite_errorname", "") == "SQLITE_NOTADB":
        return errors.StoreUnusable(f"{shown(url)} is not a SQLite database", hint="choose another --db")
    if getattr(error.orig, "sqlite_errorname", "").startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return errors.StoreUnreachable(
            f"cannot use {shown(url)}: {what}",
            hint="another program holds it in a transaction; let it commit, or find it with `fuser` and end it",
        )
    return errors.StoreUnusable(
        f"cannot use {shown(url)}: {what}", hint="check the disk and its permissions, or choose another --db"
    )


def _check_clock(connection: sa.Connection, dialect: Dialect) -> None:
    now = connection.execute(sa.select(dialect.now)).scalar()
    if now is None or (dialect.name == "sqlite" and abs(now - time.time() * 1000) > 60_000):
        raise errors.StoreUnusable(
            f"the clock of this database gives {now!r}",
            hint=f"SQLite {sqlite3.sqlite_version} may be too old",
        )


def _check_edges(connection: sa.Connection, edges: set[tuple[str, str, str]], where: str) -> None:
    stored = {tuple(row) for row in connection.execute(sa.select(schema.fsm_edges))}
    if stored != edges:
        raise errors.StoreUnusable(
            f"the state machine of {where} differs from this program's by {sorted(stored ^ edges)}",
            hint="run the program version that made this database, or start a new one with --db",
        )
