"""Durable steps of DBOS on SQLite with its default settings; runs in an environment of its own, without our packages.

`python dbos_steps.py FILE`: a line of {"seconds": s, "tasks": n} runs n workflows of one step after the other.
"""

from __future__ import annotations

import json
import sys
import threading
import time

from dbos import DBOS


@DBOS.step()
def step(number: int) -> dict[str, object]:
    """Return a result of about the size of a log row; DBOS stores it before the workflow goes on."""
    return {"number": number, "note": "x" * 100}


_begin: threading.Barrier
_ends: list[float] = []


@DBOS.workflow()
def walk(seconds: float) -> int:
    """Run steps, once every workflow of the round has started, until time is up; return how many."""
    _begin.wait()
    deadline = time.perf_counter() + seconds
    done = 0
    while time.perf_counter() < deadline:
        step(done)
        done += 1
    _ends.append(time.perf_counter())
    return done


def _round(seconds: float, tasks: int) -> dict[str, float]:
    """Run one round; only the time of the steps counts, not that of starting and ending workflows."""
    global _begin
    _begin = threading.Barrier(tasks + 1)
    _ends.clear()
    handles = [DBOS.start_workflow(walk, seconds) for _ in range(tasks)]
    _begin.wait()
    started = time.perf_counter()
    count = sum(handle.get_result() for handle in handles)
    return {"count": count, "seconds": max(_ends) - started}


def main(file: str) -> None:
    """Serve rounds."""
    answers = sys.stdout
    sys.stdout = sys.stderr
    DBOS(config={"name": "bench", "system_database_url": f"sqlite:///{file}"})
    DBOS.launch()
    answers.write(json.dumps({"ready": True}) + "\n")
    answers.flush()
    for line in sys.stdin:
        wanted = json.loads(line)
        answers.write(json.dumps(_round(wanted["seconds"], wanted["tasks"])) + "\n")
        answers.flush()
    DBOS.destroy()


if __name__ == "__main__":
    main(sys.argv[1])
