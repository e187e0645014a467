"""One command over the databases of several hosts: `--db` repeated, or a pattern."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

    from tests.integration.cli.conftest import Command

    Finished = tuple[Command, subprocess.CompletedProcess[str]]


pytestmark = pytest.mark.long


@pytest.fixture
def both(finished: Finished, tmp_path: Path) -> tuple[Command, Path]:
    """Two databases of two hosts, with other rollouts in each: (command, the folder of both)."""
    command, _ = finished
    for name in ("one.db", "two.db"):
        with (
            closing(sqlite3.connect(f"file:{command.database}?mode=ro", uri=True)) as source,
            closing(sqlite3.connect(tmp_path / name)) as copy,
        ):
            source.backup(copy)
    with closing(sqlite3.connect(tmp_path / "two.db")) as other, other:
        names = [n for (n,) in other.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'")]
        for name in names:
            other.execute(f"DROP TRIGGER {name}")
        for table, column in (
            ("rollouts", "id"), ("attempts", "rollout_id"), ("transitions", "rollout_id"), ("sandboxes", "rollout_id"),
            ("steps", "rollout_id"), ("llm_calls", "rollout_id"), ("patches", "rollout_id"), ("grades", "rollout_id"),
            ("rewards", "rollout_id"),
        ):  # fmt: skip
            other.execute(f"UPDATE {table} SET {column} = 'f' || substr({column}, 2)")
    return command, tmp_path


def test_list_and_sql_read_all_of_them_and_say_whose_a_row_is(both: tuple[Command, Path]):
    command, folder = both
    listed = command("list", "--db", str(folder / "*.db"), "--json", "-n", "5")
    rows = [json.loads(line) for line in listed.stdout.splitlines()]
    assert len(rows) == 5
    assert [r["created_at"] for r in rows] == sorted((r["created_at"] for r in rows), reverse=True)
    assert "only the newest 5" in listed.stderr
    asked = command(
        "sql", "select count(*) as n from rollouts", "--json",
        "--db", str(folder / "one.db"), "--db", f"sqlite:///{folder / 'two.db'}", "--db", str(folder / "one.db"),
    )  # fmt: skip
    assert [json.loads(line) for line in asked.stdout.splitlines()] == [
        {"database": str(folder / "one.db"), "n": 3},
        {"database": str(folder / "two.db"), "n": 3},
    ]


def test_show_finds_a_rollout_wherever_it_is_and_refuses_what_several_have(both: tuple[Command, Path]):
    command, folder = both
    names = ["--db", str(folder / "one.db"), "--db", str(folder / "two.db")]
    for name in ("one.db", "two.db"):
        with closing(sqlite3.connect(folder / name)) as database:
            (rollout_id,) = database.execute("SELECT id FROM rollouts LIMIT 1").fetchone()
        assert json.loads(command("show", rollout_id, "--json", *names).stdout)["id"] == rollout_id
    refused = command("show", "nothing", *names)
    assert refused.returncode == 2
    assert "no rollout has an id that begins with 'nothing'" in refused.stderr
    refused = command("show", "", *names)
    assert refused.returncode == 2


def test_status_clean_and_resume_treat_each_of_them(both: tuple[Command, Path]):
    command, folder = both
    (folder / "one.db.lock").touch()
    pattern = ["--db", str(folder / "*")]
    told = [json.loads(line) for line in command("status", "--json", *pattern).stdout.splitlines()]
    assert [one["states"]["released"] for one in told] == [3, 3]
    cleaned = command("clean", *pattern)
    assert cleaned.returncode == 0, cleaned.stderr
    assert cleaned.stderr.count("0 sandboxes removed") == 2
    resumed = command("resume", "--all", *pattern)
    assert (resumed.returncode, resumed.stderr.count("nothing to resume")) == (0, 2)
    assert command("resume", "--run", "no-such-run", *pattern).returncode == 2
    assert command("resume", "", *pattern).returncode == 2


def test_clean_goes_on_after_a_database_that_does_not_exist_and_proves_nothing(both: tuple[Command, Path]):
    command, folder = both
    cleaned = command("clean", "--db", str(folder / "none.db"), "--db", str(folder / "one.db"))
    assert cleaned.returncode == 1
    assert "none.db" in cleaned.stderr
    assert f"{folder / 'one.db'}: 0 sandboxes removed" in cleaned.stderr


def test_a_pattern_that_fits_nothing_is_refused(command: Command):
    ran = command("list", "--db", "nowhere/*.db")
    assert ran.returncode == 2
    assert "no file fits" in ran.stderr
