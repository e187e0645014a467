"""The door for people's SQL: reads everything, changes nothing, ends in time."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from store import errors, questions

if TYPE_CHECKING:
    from store.rollouts import Store
    from tests.conftest import Database


both = pytest.mark.databases("sqlite", "postgresql")


@both
async def test_a_query_returns_columns_and_rows(store: Store):
    found = await store.history.sql(
        "SELECT src, trig FROM fsm_edges WHERE dst = 'released'", limit=5, timeout_s=5
    )
    assert (found.columns, found.rows, found.cut) == (["src", "trig"], [("graded", "release")], False)


@both
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


@pytest.mark.databases("postgresql")
@pytest.mark.parametrize(
    "query",
    [
        "DELETE FROM rollouts",
        "WITH gone AS (DELETE FROM rollouts RETURNING id) SELECT * FROM gone",
        "SELECT 1 INTO mine",
        "SELECT * FROM rollouts FOR UPDATE",
        "SELECT setval('own', 1)",
        "COPY (SELECT 1) TO '{other}'",
        "COPY (SELECT 1) TO PROGRAM 'touch {other}'",
        "COPY (SELECT 1) TO STDOUT",
        "SET TRANSACTION READ WRITE",
        "COMMIT",
        "COMMIT; DELETE FROM rollouts",
        "DO $$BEGIN DELETE FROM rollouts; END$$",
        "LOCK TABLE rollouts",
        "CALL anything()",
        "LISTEN news",
    ],
)
async def test_postgresql_refuses_whatever_is_not_a_read(
    store: Store, new_rollout, database: Database, query: str
):
    await store.submit([new_rollout()])
    database.ask("CREATE SEQUENCE own")
    folder = Path(tempfile.mkdtemp(prefix="sql"))
    folder.chmod(0o777)  # so that the server, which is somebody else, could write there
    try:
        with pytest.raises(errors.StoreUnusable, match=r"only SELECT|data-modifying|INTO|UPDATE"):
            await store.history.sql(query.format(other=folder / "made"), limit=5, timeout_s=5)
        assert list(folder.iterdir()) == []
    finally:
        shutil.rmtree(folder)
    assert database.ask("SELECT count(*) FROM rollouts") == [(1,)]


@pytest.mark.databases("postgresql")
async def test_postgresql_gives_a_large_answer_in_parts(store: Store):
    found = await store.history.sql("SELECT generate_series(1, 100000000)", limit=250, timeout_s=20)
    assert (found.rows[-1], found.cut) == ((250,), True)


@both
async def test_two_statements_are_refused(store: Store):
    with pytest.raises(errors.StoreUnusable):
        await store.history.sql("SELECT 1; SELECT 2", limit=5, timeout_s=5)


@both
async def test_a_syntax_error_is_told_without_a_traceback(store: Store):
    with pytest.raises(errors.StoreUnusable, match="syntax error"):
        await store.history.sql("SELEC 1", limit=5, timeout_s=5)


@both
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
