from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.integration.cli.conftest import Command


@pytest.mark.slow
def test_the_offline_example_is_as_it_should_be_and_its_verdicts_are_stored(command: Command):
    ran = command("validate", command.offline)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "offline__wordcount-1\tunresolved 1\tresolved 1\tyes\t\n"
    assert command.query("select patch, outcome, as_expected from validations order by 1") == [
        ["gold", "resolved", "1"],
        ["noop", "unresolved", "1"],
    ]


@pytest.mark.slow
def test_a_test_that_passes_without_the_fix_and_a_missing_gold_patch_are_found(command: Command):
    broken = command.folder / "broken"
    shutil.copytree(command.offline, broken)
    (broken / "gold.patch").unlink()
    lists = json.loads((broken / "tests.json").read_text())
    lists["FAIL_TO_PASS"].append(lists["PASS_TO_PASS"].pop(0))
    (broken / "tests.json").write_text(json.dumps(lists))
    ran = command("validate", broken, "--json")
    assert ran.returncode == 1, ran.stderr
    row = json.loads(ran.stdout)
    assert not row["ok"]
    assert "FAIL_TO_PASS passes without a fix" in row["reasons"]
    assert "no gold patch" in row["reasons"]
    assert command.query("select patch, as_expected from validations") == [["noop", "0"]]


def test_a_refused_record_makes_the_exit_code_1(command: Command):
    path = command.folder / "tasks.jsonl"
    path.write_text('{"instance_id": "x__y-1"}\n')
    ran = command("validate", path)
    assert ran.returncode == 1
    assert "tasks.jsonl:1" in ran.stderr
