"""Workers die by the dozen and nothing is lost, leaked, graded twice or rewarded wrongly.

`ROLLOUTS_CHAOS_KILLS=2000 pytest -s tests/acceptance/test_chaos.py -m long` runs the long lanes with so many kills on each
engine instead of their own number; `ROLLOUTS_CHAOS_SEED` repeats the choices of an earlier run.
"""

from __future__ import annotations

import os
import random
import sqlite3
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from orchestrator.testing.box_service import ORACLE
from orchestrator.testing.remote_boxes import box_service
from tests.acceptance.chaos import Chaos, Plan, clean, outside, scripted_model
from tests.acceptance.chaos_facts import judge
from tests.acceptance.chaos_worker import Workers
from tests.integration.durability import facts
from tests.integration.durability.conftest import OwnServer

if TYPE_CHECKING:
    from collections.abc import Iterator

KILLS = int(os.environ.get("ROLLOUTS_CHAOS_KILLS", "0"))
SEED = int(os.environ.get("ROLLOUTS_CHAOS_SEED") or random.randrange(1 << 31))
PATIENCE_S = 300.0 + 10.0 * KILLS


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers() as server:
        yield server


def plan(kills: int, **more: int) -> Plan:
    kills = KILLS or kills
    return Plan(kills=kills, seed=SEED, pauses=kills // 6, limit_s=PATIENCE_S, **more)


async def run_chaos(
    plan: Plan,
    url: str,
    folder: Path,
    workers: Workers,
    server: OwnServer | None = None,
    *,
    faults: str = "0.02",
) -> None:
    """Run the plan, judge what is left, and print the figures."""
    options = ("--seed", str(plan.seed), "--fault-rate", faults, "--slow-ms", "400")
    with box_service(folder, *options) as address:
        async with outside(url, address) as runtime, scripted_model() as model:
            chaos = Chaos(plan, url, workers, runtime, address, model)
            await chaos.run(server)
            left = await clean(runtime)
            asked_wrongly = model.violations
    seen = chaos.seen
    verdict = judge(facts.dump(url), seen, folder / ORACLE, left)
    alive = [" in ".join(place) for place in sorted(seen.passed.keys() - seen.deaths.keys())]
    points = len({point for point, _ in seen.deaths}), len({point for point, _ in seen.passed})
    sys.stdout.write(
        f"chaos on {url.split(':')[0]}, seed {plan.seed}: {chaos.killed} kills {dict(seen.kills)} "
        f"and {seen.pauses} pauses and {seen.server_crashes} crashes of the server "
        f"at {points[0]} of {points[1]} failpoints, {len(seen.deaths)} of {len(seen.passed)} (failpoint, state); {verdict}\n"
        f"nobody died at {', '.join(alive)}\n"
    )
    assert verdict.violations == []
    assert asked_wrongly == []
    assert chaos.killed >= plan.kills
    assert seen.acks


@pytest.mark.long
@pytest.mark.timeout(120)
async def test_killed_workers_lose_leak_and_double_nothing(workers: Workers, tmp_path: Path):
    small = Plan(kills=6, seed=SEED, pauses=0, limit_s=100.0)
    await run_chaos(small, f"sqlite:///{tmp_path / 'rollouts.db'}", tmp_path / "boxes", workers)


@pytest.mark.long
@pytest.mark.timeout(PATIENCE_S + 120)
async def test_dozens_of_killed_workers_lose_leak_and_double_nothing_on_sqlite(
    workers: Workers, tmp_path: Path
):
    file = tmp_path / "rollouts.db"
    await run_chaos(plan(60), f"sqlite:///{file}", tmp_path / "boxes", workers)
    with closing(sqlite3.connect(file)) as raw:
        assert raw.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


@pytest.mark.long
@pytest.mark.postgres
@pytest.mark.timeout(PATIENCE_S + 120)
async def test_dozens_of_killed_workers_and_server_crashes_lose_leak_and_double_nothing_on_postgresql(
    workers: Workers, tmp_path: Path
):
    with tempfile.TemporaryDirectory(prefix="pg") as folder, closing(OwnServer(Path(folder))) as server:
        await run_chaos(plan(50, server_crashes=2), server.url, tmp_path / "boxes", workers, server)
