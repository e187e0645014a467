"""Turns at a SQLite file: what a process says and does while another one keeps it."""

from __future__ import annotations

import fcntl
import logging
import sqlite3
import threading
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

import pytest

from store import engine, errors, place

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conftest import Database, OpenStore


@contextmanager
def held(database: Path) -> Iterator[None]:
    """Hold the ticket as another process would: flock tells open files apart, not processes."""
    with database.with_name(f"{database.name}.lock").open("a") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        yield


async def test_opening_gives_up_after_a_while_and_names_the_lock_file(
    open_store: OpenStore, database: Database, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(engine, "OPEN_PATIENCE_S", 0.2)
    with held(database.file), pytest.raises(errors.StoreUnreachable, match=r"rollouts\.db\.lock"):
        await open_store()


def test_a_wait_for_the_turn_says_what_it_waits_for_and_ends_with_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    said, taken = threading.Event(), threading.Event()

    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "rollouts.db.lock" in record.getMessage():
                said.set()

    monkeypatch.setattr(place, "_SAY_AFTER_S", 0.05)
    listening = Listening()
    place.logger.addHandler(listening)

    def wait() -> None:
        with closing(place.Turns(tmp_path / "rollouts.db")) as turn, turn():
            taken.set()

    waiting = threading.Thread(target=wait)
    try:
        with held(tmp_path / "rollouts.db"):
            waiting.start()
            assert said.wait(10)
            assert not taken.is_set()
        assert taken.wait(10)
    finally:
        waiting.join(10)
        place.logger.removeHandler(listening)


def test_giving_up_ends_the_wait_of_an_open_at_once(tmp_path: Path):
    opening = place.Turns(tmp_path / "rollouts.db")(lambda: True)
    with held(tmp_path / "rollouts.db"), pytest.raises(errors.StoreUnreachable), opening:
        pytest.fail("the lock was taken although another holds it")


def test_a_database_that_stays_locked_is_not_blamed_on_the_disk(
    database: Database, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        engine, "write_engine", lambda url, busy_ms=50, make=engine.write_engine: make(url, busy_ms=50)
    )
    with closing(sqlite3.connect(database.file, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(errors.StoreUnreachable, match="locked") as found:
            engine.prepare(engine.parse_url(database.url), set(), store_uuid="0" * 32)
    assert "another program holds it" in found.value.hint


def test_options_in_a_sqlite_url_are_refused():
    with pytest.raises(errors.StoreUnusable, match="no options"):
        engine.parse_url("sqlite:///x.db?mode=ro")


def test_a_turn_that_was_given_up_is_not_taken_later_and_the_next_one_comes(tmp_path: Path):
    with closing(place.Turns(tmp_path / "rollouts.db")) as turn:
        with held(tmp_path / "rollouts.db"), pytest.raises(errors.StoreUnreachable), turn(lambda: True):
            pytest.fail("the lock was taken although another holds it")
        with held(tmp_path / "rollouts.db"):
            pass  # nobody who had given up got it when it was free
        with turn(lambda: True):
            assert is_taken(tmp_path / "rollouts.db")
        assert not is_taken(tmp_path / "rollouts.db")


def is_taken(database: Path) -> bool:
    """Ask as another process would."""
    with database.with_name(f"{database.name}.lock").open("a") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
