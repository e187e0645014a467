"""The door for people's SQL: reads everything, changes nothing, ends in time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from store import errors, questions

if TYPE_CHECKING:
    from pathlib import Path

    from store.rollouts import Store


async def test_a_query_returns_columns_and_rows(store: Store):
    found = await store.history.sql(
        "SELECT src, trig FROM fsm_edges WHERE dst = 'released'", limit=5, timeout_s=5
    )
    assert (found.columns, found.rows, found.cut) == (["src", "trig"], [("graded", "release")], False)


async def test_rows_beyond_the_limit_are_cut_and_said(store: Store):
    found = await store.history.sql("SELECT * FROM fsm_edges", limit=3, timeout_s=5)
    assert (len(found.rows), found.cut) == (3, True)


@pytest.mark.parametrize(
    "query",
    [
        "DELETE FROM rollouts",
        "INSERT INTO schema_meta VALUES ('a', 'b')",
        "CREATE TABLE mine (a)",
        "DROP TABLE rollouts",
        "PRAGMA journal_mode = DELETE",
        "PRAGMA query_only = 0",
        "ATTACH '{other}' AS other",
        "VACUUM INTO '{other}'",
        "SELECT load_extension('x')",
        "BEGIN IMMEDIATE",
    ],
)
async def test_whatever_is_not_a_read_is_refused(store: Store, tmp_path: Path, query: str):
    other = tmp_path / "other.db"
    with pytest.raises(errors.StoreUnusable, match="only SELECT"):
        await store.history.sql(query.format(other=other), limit=5, timeout_s=5)
    assert not other.exists()


async def test_two_statements_are_refused(store: Store):
    with pytest.raises(errors.StoreUnusable):
        await store.history.sql("SELECT 1; SELECT 2", limit=5, timeout_s=5)


async def test_a_syntax_error_is_told_without_a_traceback(store: Store):
    with pytest.raises(errors.StoreUnusable, match="syntax error"):
        await store.history.sql("SELEC 1", limit=5, timeout_s=5)


async def test_an_endless_query_ends_at_its_time_limit(store: Store):
    endless = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT max(x) FROM n"
    with pytest.raises(errors.StoreUnusable, match=r"longer than 0\.2 s"):
        await store.history.sql(endless, limit=5, timeout_s=0.2)


UNINTERRUPTIBLE = (
    "SELECT instr(replace(hex(zeroblob(400000)), '0', 'a'), replace(hex(zeroblob(80000)), '0', 'a') || 'b')"
)


async def test_a_single_function_cannot_outrun_the_time_limit(store: Store):
    started = time.monotonic()
    with pytest.raises(errors.StoreUnusable, match=r"longer than 0\.2 s"):
        await store.history.sql(UNINTERRUPTIBLE, limit=5, timeout_s=0.2)
    assert time.monotonic() - started < 5


async def test_one_huge_value_is_refused(store: Store):
    with pytest.raises(errors.StoreUnusable, match="too big"):
        await store.history.sql("SELECT zeroblob(20000000)", limit=5, timeout_s=5)


async def test_a_huge_answer_is_cut_and_that_is_said(store: Store, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(questions, "MAX_BYTES", 5000)
    found = await store.history.sql("SELECT zeroblob(1000) FROM fsm_edges", limit=1000, timeout_s=5)
    assert (len(found.rows), found.cut, found.too_large) == (5, True, True)


async def test_a_first_row_over_the_limit_is_still_shown(store: Store, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(questions, "MAX_BYTES", 50)
    found = await store.history.sql("SELECT zeroblob(100)", limit=5, timeout_s=5)
    assert (len(found.rows), found.cut) == (1, False)


@pytest.mark.parametrize("query", ["", " ;", "-- nothing"])
async def test_a_query_without_a_statement_is_refused(store: Store, query: str):
    with pytest.raises(errors.StoreUnusable, match="asks for nothing"):
        await store.history.sql(query, limit=5, timeout_s=5)
