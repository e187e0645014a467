"""Many processes open an empty store at the same moment: all succeed, and it is one store."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from store import place, revisions, soundness

if TYPE_CHECKING:
    from tests.conftest import Database

OPENER = Path(__file__).with_name("opener.py")


def opened_at_once(database: Database, processes: int) -> None:
    """Start the processes, let them go together, and look at what they made."""
    url = database.beside("fresh.db")
    started = [
        subprocess.Popen([sys.executable, OPENER, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(processes)
    ]  # fmt: skip
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == "loaded\n"
    for process in started:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    told = [process.communicate(timeout=300)[0].strip() for process in started]
    assert [process.returncode for process in started] == [0] * processes
    assert len(set(told)) == 1, "more than one store was made"
    assert soundness.standing(url) == revisions.newest()
    assert soundness.complaints(url) == []


@pytest.mark.databases("sqlite")
def test_four_processes_may_open_an_empty_store_at_once(database: Database):
    opened_at_once(database, 4)


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.databases("sqlite")
def test_sixty_four_processes_may_open_an_empty_store_at_once(database: Database):
    opened_at_once(database, 64)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.databases("postgresql")
def test_sixteen_processes_may_open_an_empty_database_at_once(database: Database):
    opened_at_once(database, 16)


def test_opening_takes_its_turn_among_busy_writers(tmp_path: Path):
    """Whoever asks without queueing, now and again, hardly ever finds the ticket free."""
    turns, over = itertools.count(), threading.Event()

    def write_on_and_on() -> None:
        with closing(place.Turns(tmp_path / "busy.db")) as turn:
            while not over.is_set():
                with turn():
                    next(turns)
                    over.wait(0.002)

    writers = [threading.Thread(target=write_on_and_on) for _ in range(3)]
    for writer in writers:
        writer.start()
    try:
        while next(turns) < 10:
            over.wait(0.001)
        with closing(place.Turns(tmp_path / "busy.db")) as turn, turn():
            before = next(turns)
    finally:
        over.set()
        for writer in writers:
            writer.join()
    assert before < 200
