"""Shared parts of the tests: databases of every kind, an open store, and the clock that its SQL reads.

`@pytest.mark.databases("sqlite", ...)` runs a test once on each of these kinds; without arguments on all of them.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import uuid
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from orchestrator import states
from orchestrator.identity import uuid7
from orchestrator.testing import postgres
from store import engine, revisions, rows, workers
from store.rollouts import Store

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    OpenStore = Callable[..., Awaitable[Store]]

EDGES = frozenset((src.value, trigger, dst.value) for (src, trigger), dst in states.EDGES.items())

KINDS = ("sqlite", "shared", "postgresql")
"""A SQLite file; one that another process keeps writing to; PostgreSQL. `pooled` is asked for by name."""

NOISE = Path(__file__).parent / "integration" / "store" / "noise.py"


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell makes what it runs in the background ignore Ctrl-C, and so would the programs that tests start.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "databases(*kinds): run on each kind of database, by default on all")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("databases")
    if marker is not None and "database" in metafunc.fixturenames:
        kinds = [
            pytest.param(kind, marks=[pytest.mark.postgres] if kind in ("postgresql", "pooled") else [])
            for kind in marker.args or KINDS
        ]
        metafunc.parametrize("database", kinds, indirect=True)


@dataclass(frozen=True)
class Database:
    """One database of a test; further ones beside it by name."""

    kind: str
    url: str
    beside: Callable[[str], str]
    """Return the URL of another database of the same kind, empty at first."""

    @property
    def is_sqlite(self) -> bool:
        return self.url.startswith("sqlite")

    @property
    def file(self) -> Path:
        return Path(self.url.removeprefix("sqlite:///"))

    @property
    def refusal(self) -> type[Exception]:
        """What the driver raises when the database itself refuses a statement."""
        return sqlite3.IntegrityError if self.is_sqlite else psycopg.errors.IntegrityError

    def ask(self, query: str) -> list[tuple[Any, ...]]:
        """Run one statement past the store, commit, and return its rows."""
        if self.is_sqlite:
            with closing(sqlite3.connect(self.file, timeout=30)) as raw, raw:
                raw.execute("PRAGMA foreign_keys = 1")
                return raw.execute(query).fetchall()
        with psycopg.connect(self.url) as connection:
            cursor = connection.execute(query.encode())
            return cursor.fetchall() if cursor.description else []


class Noise:
    """A second process that claims and writes rollouts of its own, run `noise`, for as long as a test lasts."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, NOISE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def tell(self, line: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self._process.stdout.readline()

    def close(self) -> None:
        self._process.communicate(timeout=30)


@pytest.fixture(scope="session")
def noise() -> Iterator[Noise]:
    with closing(Noise()) as process:
        yield process


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[postgres.PostgresServer]:
    """The server that ROLLOUTS_TEST_POSTGRES names, else one of this test process's own."""
    with postgres.PostgresServer(os.environ.get("ROLLOUTS_TEST_POSTGRES")) as server:
        yield server


def _migrate(url: str) -> None:
    writing = engine.write_engine(engine.parse_url(url))
    with writing.begin() as connection:
        revisions.upgrade(connection)
    writing.dispose()


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with the newest schema, to copy for each test: migrating takes ten times longer."""
    path = tmp_path_factory.mktemp("template") / "template.db"
    _migrate(f"sqlite:///{path}")
    return path


@pytest.fixture(scope="session")
def postgres_template(postgres_server: postgres.PostgresServer) -> Iterator[str]:
    name = f"template_{uuid.uuid4().hex}"
    _migrate(postgres_server.create(name))
    yield name
    postgres_server.drop(name)


@pytest.fixture(scope="session")
def pooler(postgres_server: postgres.PostgresServer) -> Iterator[str]:
    binary = postgres.pooler_binary()
    if binary is None or postgres_server.folder is None:
        pytest.skip("NO POOLER: install pgbouncer to prove that the store works behind it")
    with postgres.pooled(postgres_server, binary) as folder:
        yield folder


@pytest.fixture
def make_database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[str], Database]]:
    """Make a database of a kind; it ends with the test."""
    with ExitStack() as stack:

        def sqlite(name: str = "rollouts.db") -> str:
            return f"sqlite:///{tmp_path / name}"

        def postgresql(name: str = "", *, template: str = "template0") -> str:
            server = request.getfixturevalue("postgres_server")
            unique = f"{re.sub('[^a-z0-9]', '_', name) or 'rollouts'}_{uuid.uuid4().hex}"
            url: str = server.create(unique, template=template)
            stack.callback(server.drop, unique)
            return url

        def make(kind: str) -> Database:
            if kind in ("sqlite", "shared"):
                shutil.copyfile(request.getfixturevalue("sqlite_template"), tmp_path / "rollouts.db")
                if kind == "shared":
                    process: Noise = request.getfixturevalue("noise")
                    assert process.tell(f"begin {sqlite()}") == "ready\n"
                    stack.callback(_end_noise, process)
                return Database(kind, sqlite(), sqlite)
            url = postgresql(template=request.getfixturevalue("postgres_template"))
            if kind == "pooled":
                folder = request.getfixturevalue("pooler")
                url = re.sub(r"\?.*", f"?host={folder}&port=6432", url)
            return Database(kind, url, postgresql)

        yield make


def _end_noise(process: Noise) -> None:
    did = json.loads(process.tell("end"))
    assert did["refused"] == 0, "the other process was refused a write of its own rollouts"


@pytest.fixture
def database(request: pytest.FixtureRequest, make_database: Callable[[str], Database]) -> Database:
    """The test's database, a SQLite file unless the test is marked with `databases`."""
    return make_database(getattr(request, "param", "sqlite"))


@pytest.fixture
def new_id() -> Callable[[], str]:
    counter = itertools.count(1)
    return lambda: uuid7(1_800_000_000_000, next(counter).to_bytes(10, "big"))


@pytest.fixture
def open_store(database: Database, new_id: Callable[[], str]) -> OpenStore:
    """Open a store on this test's database, or on the one of that name beside it; every call is another worker."""
    made = {"rollouts.db": database.url}

    async def opened(name: str = "rollouts.db", **options: Any) -> Store:
        if name not in made:
            made[name] = database.beside(name)
        return await Store.open(
            made[name],
            worker=workers.this_process(new_id()),
            edges=EDGES,
            new_uuid=uuid.uuid4().hex,
            **options,
        )

    return opened


@pytest.fixture
async def store(open_store: OpenStore) -> AsyncIterator[Store]:
    opened = await open_store()
    yield opened
    await opened.close()


@pytest.fixture
def new_rollout(new_id: Callable[[], str]) -> Callable[..., rows.NewRollout]:
    """Make a rollout to submit; keyword arguments replace its columns."""

    def made(**columns: Any) -> rows.NewRollout:
        rollout_id = new_id()
        base: dict[str, Any] = {
            "id": rollout_id,
            "idem_key": f"key-{rollout_id}",
            "request_sha256": "request",
            "run_id": "run",
            "instance_id": "demo__demo-1",
            "task_sha256": "task",
            "task_json": "{}",
            "dataset_kind": "local",
            "eval_sha256": "eval",
            "agent_type": "swe",
            "config_sha256": "config",
            "endpoint_kind": "stateless",
            "input": {},
            "fsm_version": 1,
            "outcome_table": 1,
        }
        return rows.NewRollout(**(base | columns))

    return made
