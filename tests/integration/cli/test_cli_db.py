"""`rollouts db`, and what every command says of a database that cannot be used."""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import uuid
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from orchestrator import states
from store import engine, errors, place, revisions, soundness

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from orchestrator.testing.postgres import PostgresServer
    from tests.conftest import Database
    from tests.integration.cli.conftest import Command

HEAD = revisions.newest()
EDGES = {(src.value, trigger, dst.value) for (src, trigger), dst in states.EDGES.items()}


def migrated(path: Path, revision: str) -> None:
    writing = engine.write_engine(engine.parse_url(f"sqlite:///{path}"))
    with writing.begin() as connection:
        revisions.upgrade(connection, revision)
    writing.dispose()


def old_database(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    migrated(path, "0001")


def new_database(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    migrated(path, revisions.newest())


def test_db_upgrade_creates_a_database_and_says_so(command: Command):
    missing = command("db", "current")
    assert (missing.returncode, missing.stdout) == (2, "")
    assert "no database at" in missing.stderr
    made = command("db", "upgrade")
    assert (made.returncode, made.stderr) == (0, f"{command.database}: created, now at {HEAD}\n")
    sound = command("db", "check")
    assert (sound.returncode, sound.stdout, sound.stderr) == (0, "", f"{command.database}: sound\n")


def test_db_upgrade_brings_an_old_database_forward(command: Command):
    old_database(command.database)
    assert command("db", "current").stdout == f"0001\t{HEAD}\n"
    behind = command("db", "check")
    assert (behind.returncode, "behind this program's" in behind.stdout) == (1, True)
    assert command("db", "upgrade").stderr.endswith(f"upgraded from schema 0001, now at {HEAD}\n")
    assert soundness.complaints(f"sqlite:///{command.database}") == []


def test_db_check_tells_what_is_missing_a_line_each(command: Command):
    new_database(command.database)
    with closing(sqlite3.connect(command.database)) as raw:
        raw.execute("DROP TRIGGER rewards_no_update")
        raw.execute("DROP INDEX ix_sandboxes_open")
    told = command("db", "check", "--json")
    assert told.returncode == 1
    assert [json.loads(line)["problem"] for line in told.stdout.splitlines()] == [
        "index ix_sandboxes_open is missing",
        "guard rewards_no_update (rewards is append-only) is missing",
    ]


def test_rows_without_their_parents_and_damaged_pages_are_found(tmp_path: Path):
    new_database(tmp_path / "rollouts.db")
    with closing(sqlite3.connect(tmp_path / "rollouts.db", isolation_level=None)) as raw:
        raw.execute(
            "INSERT INTO transitions VALUES ('gone', 1, 'created', 'provision', 'sandbox_ready', 1, '', '', 0, '{}')"
        )
        raw.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    url = f"sqlite:///{tmp_path / 'rollouts.db'}"
    assert soundness.complaints(url) == ["row 1 of transitions names a row of rollouts that does not exist"]
    with (tmp_path / "rollouts.db").open("r+b") as f:
        f.seek(5 * 4096)
        f.write(b"\xff" * 4096)
    assert any("the file is damaged" in complaint for complaint in soundness.complaints(url))


@pytest.mark.long
@pytest.mark.databases("postgresql")
def test_db_works_on_postgresql(command: Command, database: Database):
    url = database.beside("empty")
    steps = [command("db", words, "--db", url) for words in ("current", "upgrade", "check")]
    assert [step.returncode for step in steps] == [0, 0, 0]
    assert steps[0].stdout == f"\t{HEAD}\n"
    assert steps[1].stderr.endswith(f"created, now at {HEAD}\n")


def told_in_one_message(ran: subprocess.CompletedProcess[str], *codes: int) -> str:
    """Check that there is one error with at most one hint, and no traceback; return the error."""
    lines = ran.stderr.splitlines()
    assert "Traceback" not in ran.stderr
    assert [line[:7] for line in lines if line.startswith("error: ")] == ["error: "], ran.stderr
    assert len(lines) <= 2, ran.stderr
    assert ran.returncode in codes, ran.stderr
    return lines[0]


def newer(path: Path) -> None:
    old_database(path)
    with closing(sqlite3.connect(path)) as raw, raw:
        raw.execute("UPDATE alembic_version SET version_num = '9999'")


def no_database(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("my notes, which are longer than a header")


def truncated(path: Path) -> None:
    old_database(path)
    with path.open("r+b") as f:
        f.truncate(10_000)


def folder(path: Path) -> None:
    path.mkdir(parents=True)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (newer, f"at schema 9999, newer than this program's {HEAD}"),
        (no_database, "is not a SQLite database"),
        (truncated, "malformed"),
        (folder, "is a folder"),
    ],
)
def test_a_bad_database_is_refused_and_left_alone(tmp_path: Path, make: Callable[[Path], None], why: str):
    database = tmp_path / "logs" / "rollouts.db"
    make(database)
    before = database.read_bytes() if database.is_file() else None
    with pytest.raises(errors.StoreUnusable, match=why):
        soundness.bring_forward(f"sqlite:///{database}", EDGES, store_uuid="u")
    assert (database.read_bytes() if database.is_file() else None) == before


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("mysql://h/db", "not supported"),
        ("sqlite:///:memory:", "in-memory"),
        ("sqlite:////proc/nowhere/x.db", "folder"),
        ("postgresql://:::", "not a database URL"),
        ("not a url", "not a database URL"),
    ],
)
def test_an_unusable_url_is_refused(url: str, why: str):
    with pytest.raises(errors.StoreUnusable, match=why):
        soundness.bring_forward(url, EDGES, store_uuid="u")


def test_a_run_on_a_bad_database_ends_with_one_message_before_it_began(command: Command):
    truncated(command.database)
    before = command.database.read_bytes()
    assert "malformed" in told_in_one_message(command("db", "upgrade"), 2)
    ran = command("run", command.offline, "--model", command.replay)
    assert (ran.returncode, "Traceback" in ran.stderr) == (2, False)
    assert ran.stderr.count("error: ") == 1
    assert "malformed" in ran.stderr
    assert command.database.read_bytes() == before


@pytest.mark.postgres
def test_a_wrong_address_user_or_database_of_postgresql_is_told_without_the_password(
    command: Command, postgres_server: PostgresServer
):
    right = postgres_server.url("postgres")
    nowhere = right.replace("/postgres?", "/nowhere?").replace("postgres@", "postgres:hunter2@")
    for words, url, why in (
        (["db", "upgrade"], "postgresql://rollouts:hunter2@127.0.0.1:9/rollouts", "refused"),
        (["list"], nowhere, "nowhere"),
    ):
        ran = command(*words, "--db", url)
        assert why in told_in_one_message(ran, 2)
        assert "hunter2" not in ran.stderr + ran.stdout
    for url in (
        "postgresql://rollouts:hunter2@no-such-host.invalid/rollouts",
        right.replace("postgres@", "nobody:hunter2@"),
    ):
        with pytest.raises(errors.NeverReached, match=r"no-such-host|nobody") as refused:
            soundness.bring_forward(url, EDGES, store_uuid="u")
        assert "hunter2" not in f"{refused.value}{refused.value.hint}"


@pytest.mark.postgres
def test_a_wrong_password_is_told_without_either_password_and_the_right_one_opens(
    command: Command, postgres_server: PostgresServer
):
    if postgres_server.folder is None:
        pytest.skip("THE SERVER IS NOT OURS: who may log in there is not for a test to change")
    user = f"locked{uuid.uuid4().hex[:8]}"
    postgres_server.add_user(user, "r1ght")
    address = postgres_server.url("postgres").split("@", 1)[1]
    for given in (f"{user}:hunter2", user):
        ran = command("db", "upgrade", "--db", f"postgresql://{given}@{address}")
        said = told_in_one_message(ran, 2)
        assert "password" in said
        assert user in said
        assert not re.search("hunter2|r1ght", ran.stderr + ran.stdout)
    ran = command("db", "current", "--db", f"postgresql://{user}:r1ght@{address}")
    assert (ran.returncode, "r1ght" in ran.stderr + ran.stdout) == (0, False)


def test_a_network_file_system_is_refused(tmp_path: Path):
    mounts = tmp_path / "mounts"
    shared = tmp_path / "sha red"
    shared.mkdir()
    escaped = str(shared).replace(" ", "\\040")
    for kind in ("nfs4", "lustre", "fuse.sshfs", "9p"):
        mounts.write_text(f"/dev/root / ext4 rw 0 0\nserver:/x {escaped} {kind} rw 0 0\n")
        with pytest.raises(errors.StoreUnusable, match=rf"network file system \({kind}\)") as refused:
            place.check(shared / "rollouts.db", create=True, mounts=mounts)
        assert "ROLLOUTS_DATABASE_URL" in refused.value.hint
        place.check(tmp_path / "rollouts.db", create=True, mounts=mounts)


READ_ONLY = """set -e
mount --bind logs logs
mount -o remount,bind,ro logs
exec "$@"
"""


def test_a_read_only_file_system_is_told_in_one_message(command: Command):
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("NO READ-ONLY FILE SYSTEM: mounting one needs root and `unshare`")
    new_database(command.database)
    before = command.database.read_bytes()
    ran = subprocess.run(
        ["unshare", "-m", "sh", "-c", READ_ONLY, "sh", sys.executable, "-m", "orchestrator", "db", "upgrade"],
        cwd=command.folder, env=command.environment(), check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    if ran.stderr.startswith(("unshare", "mount")):
        pytest.skip(f"NO READ-ONLY FILE SYSTEM: {ran.stderr.strip()}")
    assert re.search(
        "cannot be written|read-?only|unable to open", told_in_one_message(ran, 2), re.IGNORECASE
    )
    assert command.database.read_bytes() == before
