from __future__ import annotations

import csv
import io
import json
import os
import pty
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.integration.cli.conftest import Command

    Finished = tuple[Command, subprocess.CompletedProcess[str]]


@pytest.fixture
def ids(finished: Finished) -> dict[int, str]:
    """Sample -> rollout id."""
    return {
        int(sample): rollout_id for sample, rollout_id in finished[0].query("select sample, id from rollouts")
    }


def test_list_writes_one_tab_separated_line_per_rollout_into_a_pipe(finished: Finished, ids: dict[int, str]):
    listed = finished[0]("list")
    lines = [line.split("\t") for line in listed.stdout.splitlines()]
    assert {line[0] for line in lines} == set(ids.values())
    assert {(line[3], line[4], line[5], line[6]) for line in lines} == {
        ("0", "released", "1.0", "resolved"),
        ("1", "released", "0.0", "unresolved"),
        ("2", "released", "0.0", "empty_patch"),
    }
    assert listed.stderr == ""


def test_list_says_when_it_leaves_some_out(finished: Finished):
    listed = finished[0]("list", "-n", "2")
    assert len(listed.stdout.splitlines()) == 2
    assert "only the newest 2" in listed.stderr


def test_list_filters(finished: Finished):
    command, _ = finished
    for options, count in (
        (["--run", "first", "--since", "1h", "--instance", "offline__wordcount-1", "--state", "released"], 3),
        (["--run", "other"], 0), (["--state", "failed"], 0), (["--since", "2999-01-01"], 0),
    ):  # fmt: skip
        assert len(command("list", *options).stdout.splitlines()) == count, options


def test_list_gives_json_lines_and_csv_with_times_as_epoch_milliseconds(finished: Finished):
    command, _ = finished
    objects = [json.loads(line) for line in command("list", "--json").stdout.splitlines()]
    table = list(csv.DictReader(io.StringIO(command("list", "--csv").stdout)))
    assert [o["id"] for o in objects] == [row["id"] for row in table]
    assert all(isinstance(o["created_at"], int) and row["created_at"].isdigit() for o, row in zip(objects, table, strict=True))  # fmt: skip


def test_csv_has_its_header_even_without_rows(finished: Finished):
    command, _ = finished
    header = command("list", "--csv").stdout.splitlines()[0]
    assert command("list", "--csv", "--run", "other").stdout == f"{header}\n"


def test_an_unknown_state_names_the_known_ones(finished: Finished):
    ran = finished[0]("list", "--state", "done")
    assert ran.returncode == 2
    assert "states: created, sandbox_ready" in ran.stderr


def test_show_tells_every_transition_patch_grade_and_reward(finished: Finished, ids: dict[int, str]):
    shown = finished[0]("show", ids[0])
    sections = [line.split("\t") for line in shown.stdout.splitlines()]
    assert [line[3] for line in sections if line[0] == "transitions"] == [
        "provision", "start_agent", "take_patch", "grade", "release",
    ]  # fmt: skip
    assert {line[2] for line in sections if line[0] == "sandboxes"} == {"task", "grading"}
    assert ["stats", "resolved", "1"] in sections
    whole = json.loads(finished[0]("show", ids[0], "--json").stdout)
    assert whole["rewards"][0]["reward"] == 1.0
    assert whole["grades"][0]["outcome"] == "resolved"
    assert len(whole["transitions"]) == 5


def test_an_id_may_be_shortened_while_only_one_rollout_begins_so(finished: Finished, ids: dict[int, str]):
    command, _ = finished
    assert ids[2] in command("show", ids[2][:-2]).stdout
    several = command("show", ids[0][:8])
    assert several.returncode == 2
    assert "more than one rollout" in several.stderr
    none = command("show", "ffff")
    assert none.returncode == 2
    assert "no rollout has an id" in none.stderr


def test_the_printed_patch_can_be_applied(finished: Finished, ids: dict[int, str]):
    command, _ = finished
    patch = command("show", ids[0], "--patch").stdout
    checked = subprocess.run(
        ["git", "apply", "--check", "-"], input=patch, text=True, cwd=command.offline / "repo", check=False,
        env={"PATH": os.environ["PATH"], "GIT_CEILING_DIRECTORIES": str(command.offline)}, capture_output=True,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stderr
    assert command("show", ids[2], "--patch").stdout == ""


def test_the_transcript_is_one_message_a_line_and_the_log_is_what_the_tests_wrote(
    finished: Finished, ids: dict[int, str]
):
    command, _ = finished
    messages = [json.loads(line) for line in command("show", ids[0], "--transcript").stdout.splitlines()]
    assert [m["role"] for m in messages[:3]] == ["system", "user", "assistant"]
    assert "passed" in command("show", ids[0], "--log").stdout
    both = command("show", ids[0], "--log", "--patch")
    assert both.returncode == 2


def test_sql_cannot_change_anything(finished: Finished):
    command, _ = finished
    for statement in ("delete from rewards", "attach 'x.db' as x"):
        ran = command("sql", statement)
        assert ran.returncode == 2, statement
        assert "only SELECT is allowed" in ran.stderr
    assert command.query("select count(*) from rewards") == [["3"]]


def test_sql_gives_json_and_csv_and_says_when_it_cut(finished: Finished):
    command, _ = finished
    cut = command("sql", "select sample, reward from rollouts join rewards on id = rollout_id order by 1", "--json", "--limit", "2")  # fmt: skip
    assert [json.loads(line) for line in cut.stdout.splitlines()] == [
        {"sample": 0, "reward": 1.0},
        {"sample": 1, "reward": 0.0},
    ]
    assert "cut after 2 rows" in cut.stderr
    assert command("sql", "select 1 as a, 2 as a", "--csv").stdout == "a,a_2\n1,2\n"
    assert "CREATE TABLE rollouts" in command("sql", "--schema").stdout
    endless = "with recursive n(i) as (select 1 union all select i + 1 from n) select count(*) from n"
    slow = command("sql", endless, "--timeout", "0.3")
    assert slow.returncode == 2
    assert "longer than 0.3 s" in slow.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["select 1", "--limit", "0"],
        ["select 1", "--limit", "99999999999999999999"],
        ["  "],
        ["select 1", "--timeout", "nan"],
    ],
    ids=["no rows", "too many rows", "empty", "no time"],
)
def test_sql_takes_no_limit_out_of_range_and_no_empty_query(finished: Finished, arguments: list[str]):
    ran = finished[0]("sql", *arguments)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "Traceback" not in ran.stderr


def test_without_a_database_there_is_a_message(command: Command):
    ran = command("list")
    assert ran.returncode == 2
    assert "there is no database at" in ran.stderr
    assert "hint: " in ran.stderr


def test_a_terminal_gets_a_table(finished: Finished):
    command, _ = finished
    master, slave = pty.openpty()
    try:
        subprocess.run(
            [sys.executable, "-m", "orchestrator", "list"],
            cwd=command.folder,
            env={**command.environment(), "NO_COLOR": "1", "COLUMNS": "120"},
            stdout=slave,
            stderr=subprocess.PIPE,
            check=True,
        )
        shown = os.read(master, 100_000).decode()
    finally:
        os.close(slave)
        os.close(master)
    assert "instance_id" in shown
    assert "empty_patch" in shown
    assert "\t" not in shown
    assert "\x1b[3" not in shown


def test_help_is_quick_to_come_because_it_loads_neither_openai_nor_alembic_nor_sqlalchemy(command: Command):
    traced = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "orchestrator", "--help"],
        env=command.environment(), capture_output=True, text=True, check=True,
    )  # fmt: skip
    loaded = {line.rpartition("|")[2].strip() for line in traced.stderr.splitlines()}
    assert "orchestrator.cli.main" in loaded
    assert not loaded & {"openai", "alembic", "sqlalchemy", "plotly", "pydantic", "aenv"}
    for name in ("run", "validate", "list", "show", "sql"):
        assert f" {name} " in traced.stdout


def test_the_bare_command_prints_help_and_exits_with_2(command: Command):
    ran = command()
    assert ran.returncode == 2
    assert "Usage" in ran.stdout + ran.stderr


def test_debug_shows_the_traceback_and_without_it_there_is_none(command: Command):
    assert "Traceback" not in command("list").stderr
    assert "Traceback" in command("list", "--debug").stderr
