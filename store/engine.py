"""Opening a database: the URL rule, the engines with their settings, the checks that refuse an unusable one.

Writers use one synchronous engine whose transactions all begin IMMEDIATE; readers an async one that cannot write.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from store import errors, schema

if TYPE_CHECKING:
    from collections.abc import Iterator

MIGRATIONS = Path(__file__).resolve().parent.parent / "migrations"
_NETWORK_FILE_SYSTEMS = frozenset(
    {
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "smbfs",
        "lustre",
        "gpfs",
        "beegfs",
        "ceph",
        "9p",
        "afs",
        "glusterfs",
        "fuse.sshfs",
    }
)
_BUSY_MS = 30_000


def parse_url(url: str) -> sa.URL:
    """Return the SQLAlchemy URL of a database; raises `StoreUnusable` for anything but a SQLite file."""
    try:
        parsed = sa.make_url(url)
    except sa.exc.ArgumentError:
        raise errors.StoreUnusable(
            f"not a database URL: {url!r}", hint="write sqlite:///path/to/rollouts.db"
        ) from None
    if parsed.get_backend_name() != "sqlite":
        raise errors.StoreUnusable(
            f"database kind {parsed.get_backend_name()!r} is not supported",
            hint="write sqlite:///path/to/rollouts.db",
        )
    if not parsed.database or parsed.database == ":memory:":
        raise errors.StoreUnusable(
            "an in-memory database would forget every rollout",
            hint="name a file: sqlite:///path/to/rollouts.db",
        )
    return parsed


def file_of(url: sa.URL) -> Path:
    """Return the database file of a SQLite URL."""
    return Path(str(url.database)).absolute()


def check_place(path: Path, *, create: bool) -> None:
    """Refuse a path where a durable SQLite file cannot live.

    Raises `StoreUnusable` naming the path and what to do; with `create`, makes the folder.
    """
    if create:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise errors.StoreUnusable(
                f"cannot make the folder of {path}: {e.strerror}", hint="choose another --db"
            ) from e
    elif not path.exists():
        raise errors.StoreUnusable(
            f"there is no database at {path}", hint="name one with --db sqlite:///PATH"
        )
    kind = _file_system(path.parent)
    if kind in _NETWORK_FILE_SYSTEMS:
        raise errors.StoreUnusable(
            f"{path} is on a network file system ({kind}), where SQLite loses data",
            hint="set --db or ROLLOUTS_DATABASE_URL to a file on a local disk",
        )
    if path.is_dir():
        raise errors.StoreUnusable(f"{path} is a folder, not a database", hint="name a file in it")
    if path.exists() and path.stat().st_size:
        with path.open("rb") as f:
            if f.read(16) != b"SQLite format 3\0":
                raise errors.StoreUnusable(f"{path} is not a SQLite database", hint="choose another --db")
    if create and not os.access(path if path.exists() else path.parent, os.W_OK):
        raise errors.StoreUnusable(
            f"{path} cannot be written", hint="choose another --db or mend its permissions"
        )


def _file_system(folder: Path) -> str:
    resolved = folder.resolve()
    best, kind = -1, ""
    for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines():
        mount, fs = line.split()[1:3]
        if resolved.is_relative_to(mount.replace("\\040", " ")) and len(mount) > best:
            best, kind = len(mount), fs
    return kind


def write_engine(url: sa.URL) -> sa.Engine:
    """Return the engine of the writer thread: one connection, WAL, synchronous FULL, BEGIN IMMEDIATE."""
    engine = sa.create_engine(
        url,
        poolclass=sa.pool.SingletonThreadPool,
        connect_args={"timeout": _BUSY_MS / 1000, "check_same_thread": False},
    )

    @event.listens_for(engine, "connect")
    def _connect(connection: Any, _record: object) -> None:  # noqa: ANN401 - the DBAPI's own type
        connection.isolation_level = None
        _pragma(connection, "journal_mode", "wal")
        _pragma(connection, "synchronous", 2)
        _pragma(connection, "foreign_keys", 1)
        _pragma(connection, "busy_timeout", _BUSY_MS)

    @event.listens_for(engine, "begin")
    def _begin(connection: sa.Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    return engine


def _pragma(connection: sqlite3.Connection, name: str, value: str | int) -> None:
    connection.execute(f"PRAGMA {name} = {value}").fetchall()
    (got,) = connection.execute(f"PRAGMA {name}").fetchone()
    if got != value:
        raise errors.StoreUnusable(
            f"this SQLite would not set {name} to {value} (it stays {got})",
            hint="put the database on a local disk",
        )


def read_engine(url: sa.URL) -> AsyncEngine:
    """Return an async engine whose connections cannot write."""
    engine = create_async_engine(
        url.set(drivername="sqlite+aiosqlite"), connect_args={"timeout": _BUSY_MS / 1000}
    )

    @event.listens_for(engine.sync_engine, "connect")
    def _connect(connection: Any, _record: object) -> None:  # noqa: ANN401 - the DBAPI's own type
        cursor = connection.cursor()
        cursor.execute("PRAGMA query_only = 1")
        cursor.close()

    return engine


@contextmanager
def ticket(path: Path) -> Iterator[None]:
    """Hold the database's queue ticket: a lock file of its own, so that processes take turns instead of starving."""
    fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def prepare(engine: sa.Engine, path: Path, edges: set[tuple[str, str, str]], *, store_uuid: str) -> str:
    """Bring the database to the newest schema, check it, and return the store's uuid.

    The first open of many processes is serialised by the ticket. Raises `StoreUnusable` for a newer schema, another
    state machine or a clock expression that does not work.
    """
    with ticket(path), engine.begin() as connection:
        now = connection.exec_driver_sql(f"SELECT {schema.SQLITE_NOW}").scalar()
        if now is None or abs(now - time.time() * 1000) > 60_000:
            raise errors.StoreUnusable(f"the clock of this SQLite {sqlite3.sqlite_version} gives {now!r}")
        upgrade(connection)
        stored = {tuple(row) for row in connection.execute(sa.select(schema.fsm_edges))}
        if stored != edges:
            raise errors.StoreUnusable(
                f"the state machine of {path} differs from this program's by {sorted(stored ^ edges)}",
                hint="run the program version that made this database, or start a new one with --db",
            )
        connection.execute(
            sa.insert(schema.schema_meta).prefix_with("OR IGNORE"), {"key": "store_uuid", "value": store_uuid}
        )
        found = connection.execute(
            sa.select(schema.schema_meta.c.value).where(schema.schema_meta.c.key == "store_uuid")
        ).scalar_one()
        return str(found)


def upgrade(connection: sa.Connection) -> None:
    """Run the migrations that are missing; raises `StoreUnusable` when the database is newer than this program."""
    head = newest_revision()
    at = current_revision(connection)
    if at == head:
        return
    from alembic import command

    config = _alembic_config()
    config.attributes["connection"] = connection
    known = {script.revision for script in _scripts().walk_revisions()}
    if at is not None and at not in known:
        raise errors.StoreUnusable(
            f"the database is at schema {at}, newer than this program's {head}", hint="update the program"
        )
    command.upgrade(config, "head")


def current_revision(connection: sa.Connection) -> str | None:
    """Return the schema revision a database is at, None for an empty one."""
    has = connection.exec_driver_sql("SELECT 1 FROM sqlite_master WHERE name = 'alembic_version'").scalar()
    if not has:
        return None
    found = connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar()
    return None if found is None else str(found)


def newest_revision() -> str:
    """Return the revision this program's migrations lead to (file names begin with it)."""
    return max(p.name.split("_", 1)[0] for p in (MIGRATIONS / "versions").glob("[0-9]*.py"))


def _alembic_config() -> Any:  # noqa: ANN401 - alembic is imported only where a migration runs
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    return config


def _scripts() -> Any:  # noqa: ANN401 - as above
    from alembic.script import ScriptDirectory

    return ScriptDirectory.from_config(_alembic_config())
