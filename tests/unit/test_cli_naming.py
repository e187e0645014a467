from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from orchestrator import errors, settings
from orchestrator.cli import naming
from orchestrator.cli.preparation import parsed_changes

if TYPE_CHECKING:
    from pathlib import Path


def test_the_first_run_has_the_plain_name():
    assert naming.choose("run", [], {}) == naming.Chosen(name="run")


def test_an_unfinished_run_is_continued_and_that_is_said():
    chosen = naming.choose("run", ["run"], {"run": {"released": 2, "patched": 1}})
    assert chosen.name == "run"
    assert "1 of 3 rollouts are unfinished" in chosen.notice


def test_a_finished_run_is_followed_by_the_next_number():
    chosen = naming.choose("run", ["run"], {"run": {"released": 2, "failed": 1}})
    assert chosen.name == "run.2"
    assert "--run run)" in chosen.notice


def test_the_newest_run_decides_and_numbers_are_compared_as_numbers():
    family = ["run", "run.2", "run.10", "run.9"]
    assert naming.newest_of("run", family) == ("run.10", 10)
    assert naming.choose("run", family, {"run.10": {"released": 1}}).name == "run.11"
    assert naming.choose("run", family, {"run.10": {"created": 1}}).name == "run.10"


@pytest.mark.parametrize("other", ["run.a", "run.02", "run.", "runs", "run.2.3"])
def test_other_names_that_begin_alike_are_no_relatives(other: str):
    assert naming.newest_of("run", ["run", other]) == ("run", 1)


def test_the_name_is_readable_and_depends_on_everything_that_is_run(tmp_path: Path):
    tasks = tmp_path / "my tasks.jsonl"
    tasks.touch()
    base = settings.load("train", arguments={"llm.model": "org/Model-7B"}, environ={})
    name = naming.derived_name(tasks, base, "train")
    assert name.startswith("my-tasks-swe-org-Model-7B-train-")
    assert name == naming.derived_name(tasks, base, "train")
    warmer = settings.load(
        "train", arguments={"llm.model": "org/Model-7B", "agent.temperature": 1.0}, environ={}
    )
    assert naming.derived_name(tasks, warmer, "train") != name
    assert naming.derived_name(tmp_path / "other.jsonl", base, "train") != name


def test_changes_are_read_as_yaml():
    assert parsed_changes(["agent.step_limit=3", "agent.tools=[bash, view]", "llm.model=a=b"]) == {
        "agent.step_limit": 3,
        "agent.tools": ["bash", "view"],
        "llm.model": "a=b",
    }


@pytest.mark.parametrize("change", ["agent.step_limit", "step_limit=3", "a.b.c=3", "agent.tools=[a"])
def test_a_change_of_another_form_is_refused(change: str):
    with pytest.raises(errors.ConfigError):
        parsed_changes([change])
