from __future__ import annotations

import csv
import io
import json

import pytest

from orchestrator import errors
from orchestrator.cli import render, summary
from orchestrator.cli.console import clean
from orchestrator.cli.look import _since_ms

HOSTILE = "test_x[bold]\x1b[31mred\x1b]0;title\x07\x9b2J[/x]\u202eabc\nnext\tcolumn"
ROWS = [{"id": HOSTILE, "at": 1_700_000_000_123, "n": None}]
COLUMNS = [render.Column("id"), render.Column("at", is_time=True), render.Column("n")]


def dangerous(text: str) -> set[str]:
    return set(text) & set("\x1b\x07\x9b\u202e")


def test_control_and_reordering_characters_never_pass():
    assert clean("plain text, ä, 漢字, [bold]") == "plain text, ä, 漢字, [bold]"
    assert not dangerous(clean(HOSTILE))
    assert "\n" not in clean(HOSTILE)


@pytest.mark.parametrize("form", list(render.Form), ids=lambda form: form.value)
def test_no_form_lets_stored_text_act_on_a_terminal(form: render.Form, capsys: pytest.CaptureFixture[str]):
    render.emit(ROWS, COLUMNS, form)
    out = capsys.readouterr().out
    assert not dangerous(out)
    assert "[bold]" in out.replace("\n", "")


def test_lines_have_one_tab_between_columns_whatever_the_text_holds(capsys: pytest.CaptureFixture[str]):
    render.emit(ROWS, COLUMNS, render.Form.LINES)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.split("\t")[1:] == ["2023-11-14T22:13:20.123Z", ""]


def test_json_keeps_the_text_whole_and_times_as_numbers(capsys: pytest.CaptureFixture[str]):
    render.emit(ROWS, COLUMNS, render.Form.JSON)
    assert json.loads(capsys.readouterr().out) == ROWS[0]


def test_json_has_null_where_a_number_is_not_finite():
    row = {"a": float("inf"), "b": [float("nan"), 1.5], "c": {"d": float("-inf")}, "e": b"\xff"}
    assert json.loads(render.json_line(row), parse_constant=pytest.fail) == {
        "a": None, "b": [None, 1.5], "c": {"d": None}, "e": "ff",
    }  # fmt: skip


def test_csv_has_a_header_and_times_as_numbers(capsys: pytest.CaptureFixture[str]):
    render.emit(ROWS, COLUMNS, render.Form.CSV)
    (row,) = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert (row["at"], row["n"]) == ("1700000000123", "")


def test_a_table_folds_long_text_instead_of_cutting_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "40")
    render.emit([{"id": "x" * 100}], [render.Column("id")], render.Form.TABLE)
    assert capsys.readouterr().out.count("x") == 100


def test_relative_and_absolute_times_are_understood():
    assert _since_ms("90m", 10_000.0) == (10_000 - 5400) * 1000
    assert _since_ms("2026-01-31", 0.0) == 1_769_817_600_000
    assert _since_ms("2026-01-31T01:00+01:00", 0.0) == 1_769_817_600_000
    with pytest.raises(errors.UsageError, match="is no time"):
        _since_ms("yesterday", 0.0)


def line(state: str, reward: float | None, outcome: str | None, **more: object) -> dict[str, object]:
    return {
        "instance_id": "a__a-1", "state": state, "reward": reward, "grade_outcome": outcome, "mask_sample": 0,
        "failure_class": None, **more,
    }  # fmt: skip


def test_a_summary_averages_only_numbers_and_counts_what_has_none():
    rows = [
        line("released", 1.0, "resolved"),
        line("released", 0.0, "unresolved"),
        line("released", None, "no_report", mask_sample=1),
        line("failed", None, None, failure_class="llm_unreachable"),
        line("created", None, None),
    ]
    assert summary.by_instance(rows) == [
        {
            "instance_id": "a__a-1", "samples": 5, "resolved": 1, "reward_mean": 0.5, "no_reward": 2,
            "outcomes": "failed:llm_unreachable 1, masked:no_report 1, resolved 1, unfinished:created 1, unresolved 1",
        }
    ]  # fmt: skip
