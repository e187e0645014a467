"""`rollouts doctor`: each check well and ill, no secret shown, nothing made."""

from __future__ import annotations

import json
import shutil
import sqlite3
import sys
import threading
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.cli import doctor
from orchestrator.settings import SandboxSettings
from store import engine, revisions, standing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.integration.cli.conftest import Command

SECRET = "hunter2"
CLOSED = "http://127.0.0.1:9"


@pytest.fixture
def command(command: Command, tmp_path: Path) -> Command:
    """The command in an empty folder, with temporary files of its own."""
    folder, temporary = tmp_path / "here", tmp_path / "tmp"
    folder.mkdir()
    temporary.mkdir()
    command.folder = folder
    command.environ["TMPDIR"] = str(temporary)
    return command


def checks(command: Command, *arguments: str, code: int = 0) -> dict[str, dict[str, str]]:
    """Return the findings by the name of their check."""
    ran = command("doctor", "--json", *arguments)
    assert ran.returncode == code, ran.stdout + ran.stderr
    return {found["check"]: found for found in map(json.loads, ran.stdout.splitlines())}


def with_programs(command: Command, folder: Path, *names: str) -> None:
    """Let the command find only these programs."""
    folder.mkdir()
    for name in names:
        found = shutil.which(name)
        assert found is not None
        (folder / name).symlink_to(found)
    command.environ["PATH"] = str(folder)


def made(path: Path, revision: str) -> None:
    path.parent.mkdir(exist_ok=True)
    writing = engine.write_engine(engine.parse_url(f"sqlite:///{path}"))
    with writing.begin() as connection:
        revisions.upgrade(connection, revision)
    writing.dispose()


@contextmanager
def server(status: int, address: tuple[str, int] = ("127.0.0.1", 0)) -> Iterator[tuple[str, list[str]]]:
    """Answer every GET with a status; yield the address and what was asked."""
    asked: list[str] = []

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(f"{self.path} {self.headers.get('Authorization', '')}".strip())
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(address, Answer) as listening:
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://{listening.server_address[0]!s}:{listening.server_address[1]}", asked
        finally:
            listening.shutdown()
            thread.join()


def test_a_fresh_machine_is_looked_at_and_left_as_it_was(command: Command, tmp_path: Path):
    found = checks(command)
    assert {name: f["verdict"] for name, f in found.items() if f["verdict"] == "fail"} == {}
    assert found["schema"]["verdict"] == "warn"
    assert found["database"]["found"] == f"{command.database}, from the default"
    assert found["python"]["found"].startswith(".".join(map(str, sys.version_info[:3])))
    assert found["sqlite"]["found"] == sqlite3.sqlite_version
    assert found["isolation"]["found"] in ("bwrap", "unshare")
    assert set(found) >= {"areal-sweagent", "sqlalchemy", "aiosqlite", "psycopg", "openai", "transitions", "aenvironment"}  # fmt: skip
    assert not set(found) & {"model endpoint", "AEnvironment"}
    assert [path.name for path in command.folder.iterdir() if not path.name.startswith(".said-")] == []
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_pipe_gets_a_line_for_each_check_and_standard_error_the_sum(command: Command):
    ran = command("doctor", "--base-url", CLOSED)
    lines = [line.split("\t") for line in ran.stdout.splitlines()]
    assert {len(line) for line in lines} == {4}
    assert ran.returncode == 1
    assert [line[0] for line in lines if line[1] == "fail"] == ["model endpoint"]
    warned = sum(line[1] == "warn" for line in lines)
    assert ran.stderr == f"{len(lines)} checks: 1 failed, {warned} with a warning\n"


def test_it_says_where_the_database_was_named(command: Command, tmp_path: Path):
    command.environ["LOG_DIR"] = str(tmp_path / "elsewhere")
    found = checks(command)
    assert found["database"]["found"] == f"{tmp_path}/elsewhere/rollouts.db, from LOG_DIR"
    assert found["LOG_DIR"]["found"].startswith(f"{tmp_path}/elsewhere is not there yet")
    command.environ["ROLLOUTS_DATABASE_URL"] = f"sqlite:///{tmp_path}/a.db"
    assert checks(command)["database"]["found"] == f"{tmp_path}/a.db, from ROLLOUTS_DATABASE_URL"
    assert (
        checks(command, "--db", str(tmp_path / "b.db"))["database"]["found"] == f"{tmp_path}/b.db, from --db"
    )


def test_a_database_must_open_and_be_at_the_newest_schema(command: Command):
    made(command.database, "0001")
    behind = checks(command, code=1)["schema"]
    assert (behind["verdict"], behind["todo"]) == ("fail", "rollouts db upgrade")
    assert behind["found"] == f"0001, behind {revisions.newest()}"
    made(command.database, "head")
    assert checks(command)["schema"]["found"] == f"{revisions.newest()}, the newest"
    with closing(sqlite3.connect(command.database)) as raw, raw:
        raw.execute("UPDATE alembic_version SET version_num = '9999'")
    assert checks(command)["schema"]["found"].endswith("and open to it")
    with closing(sqlite3.connect(command.database)) as raw, raw:
        raw.execute("UPDATE schema_meta SET value = '9999' WHERE key = 'min_code'")
    assert "newer than this program" in checks(command, code=1)["schema"]["found"]
    command.database.write_bytes(b"something else altogether")
    assert "is not a SQLite database" in checks(command, code=1)["schema"]["found"]


def test_a_place_where_nothing_can_be_made_fails(command: Command, tmp_path: Path):
    (tmp_path / "file").touch()
    command.environ["LOG_DIR"] = str(tmp_path / "file" / "logs")
    found = checks(command, code=1)
    for name in ("schema", "LOG_DIR"):
        assert found[name]["verdict"] == "fail"
        assert f"cannot be made in {tmp_path}/file" in found[name]["found"]


def test_a_network_file_system_is_not_safe_for_sqlite(tmp_path: Path):
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/a / ext4 rw 0 0\nserver:/x {tmp_path}/far nfs4 rw 0 0\n")
    assert standing.file_system(tmp_path / "far" / "logs" / "r.db", mounts=mounts) == ("nfs4", False)
    assert standing.file_system(tmp_path / "near" / "r.db", mounts=mounts) == ("ext4", True)


@pytest.mark.parametrize("form", [[], ["--json"]], ids=["lines", "json"])
@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://me:{SECRET}@127.0.0.1:9/rollouts?sslpassword={SECRET}",
        f"postgresql://me:{SECRET}@127.0.0.1:port/rollouts",
        f"mysql://me:{SECRET}@127.0.0.1/rollouts",
        f"sqlite:///rollouts.db?key={SECRET}",
        f"postgresql://127.0.0.1:9/rollouts?password={SECRET}&nonsense={SECRET}",
    ],
    ids=["silent server", "no port", "other kind", "sqlite with options", "unknown option"],
)
def test_no_secret_is_shown(command: Command, url: str, form: list[str]):
    command.environ |= {
        "ROLLOUTS_DATABASE_URL": url,
        "AENV_SYSTEM_URL": f"http://me:{SECRET}@127.0.0.1/?key={SECRET}",
        "OPENAI_API_KEY": SECRET,
    }
    ran = command("doctor", *form, "--base-url", f"http://me:{SECRET}@127.0.0.1:9/v1?key={SECRET}")
    assert ran.returncode == 1
    assert SECRET not in ran.stdout + ran.stderr
    assert "database" in ran.stdout
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize(
    ("status", "verdict"),
    [(200, "ok"), (404, "ok"), (401, "fail"), (503, "fail")],
    ids=["answers", "does not know the question", "refuses the key", "has nobody behind it"],
)
def test_the_model_endpoint_is_asked_with_the_key(command: Command, status: int, verdict: str):
    command.environ["OPENAI_API_KEY"] = SECRET
    with server(status) as (url, asked):
        command.environ["OPENAI_BASE_URL"] = f"{url}/v1/"
        found = checks(command, code=int(verdict == "fail"))["model endpoint"]
    assert asked == [f"/v1/models Bearer {SECRET}"]
    assert (found["verdict"], found["found"]) == (verdict, f"{url}/v1/models answers with status {status}")
    assert bool(found["todo"]) == (verdict == "fail")


def test_aenvironment_is_asked_at_the_port_of_its_control_plane(command: Command):
    command.environ["AENV_SYSTEM_URL"] = ""
    assert "AEnvironment" not in checks(command)
    host = "127.94.31.7"
    command.environ["AENV_SYSTEM_URL"] = f"https://{host}:1234/x"
    away = checks(command, code=1)["AEnvironment"]
    assert away["found"].startswith(f"http://{host}:8080/health cannot be reached")
    with server(200, (host, 8080)) as (_, asked):
        assert checks(command)["AEnvironment"]["verdict"] == "ok"
    assert asked == ["/health"]
    command.environ["AENV_SYSTEM_URL"] = "http://"
    assert checks(command, code=1)["AEnvironment"]["found"] == "AENV_SYSTEM_URL names no host"


async def test_isolation_that_is_refused_fails_with_what_to_do(tmp_path: Path):
    (found,) = await doctor._tried(SandboxSettings(isolation="none", root=tmp_path))
    assert (found.check, found.verdict) == ("isolation", doctor.Verdict.FAIL)
    assert "--allow-no-isolation" in found.todo


def test_a_folder_of_sandboxes_that_is_somebody_else_s_fails(command: Command, tmp_path: Path):
    (tmp_path / "tmp" / "areal-sweagent").symlink_to(tmp_path)
    found = checks(command, code=1)["isolation"]
    assert (found["verdict"], "belongs to somebody else" in found["found"]) == ("fail", True)
    assert found["todo"] == "set sandbox.root to a folder of your own"


def test_programs_are_found_or_named_as_missing(command: Command, tmp_path: Path):
    with_programs(command, tmp_path / "bin", "bash", "rm", "chmod", "bwrap")
    found = checks(command, code=1)
    assert (found["git"]["verdict"], found["git"]["todo"]) == ("fail", "install git")
    assert "GNU bash" in found["bash"]["found"]
    assert found["ccgateway"]["verdict"] == "warn"
    assert "cc, codex, opencode and oh" in found["ccgateway"]["found"]
    gateway = tmp_path / "gateway"
    gateway.touch(mode=0o755)
    command.environ["ROLLOUTS_CCGATEWAY"] = str(gateway)
    assert checks(command, code=1)["ccgateway"]["found"] == str(gateway)
    gateway.chmod(0o644)
    assert checks(command, code=1)["ccgateway"]["verdict"] == "fail"
