"""Whether work on live rollouts costs the same beside a million finished ones: claim, and the scan of a recovery."""

from __future__ import annotations

import asyncio
import sqlite3
import statistics
import time
from typing import TYPE_CHECKING

from bench.store_rounds import workload
from store import rows, triggers

if TYPE_CHECKING:
    from pathlib import Path

    from store.rollouts import Store

FEW = 1_000
MANY = 1_000_000
SIZES = ("few", "many")
CRASHED = 1_000
LIVE = 2_048
CLAIM = 64
_BORN = "rollouts_born"
"""The guard against rollouts that begin anywhere but in created: off while finished ones are loaded."""

_LOAD = """WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < :count)
INSERT INTO rollouts (id, idem_key, request_sha256, run_id, instance_id, task_sha256, agent_type, config_sha256,
  endpoint_kind, input, state, version, fence, attempts, not_before, fsm_version, outcome_table, created_at, updated_at,
  finished_at)
SELECT printf('f%015d', i), printf('f%063d', i), :digest, 'old', 'bench__bench-1', :digest, 'swe', :digest, 'stateless',
  '{}', 'released', 5, 1, 1, 0, 1, 1, i, i, i FROM n"""

_PLAN = """EXPLAIN QUERY PLAN SELECT id FROM rollouts WHERE finished_at IS NULL AND not_before <= 1
  AND (lease_until IS NULL OR lease_until < 1) ORDER BY not_before, id LIMIT 64"""
_SCAN = "SELECT id, state, lease_owner, lease_until FROM rollouts WHERE finished_at IS NULL"
"""What a recovery reads: every rollout that is not over, with its owner."""


async def _make(path: Path, finished: int) -> None:
    store = await workload.open_store(f"sqlite:///{path}")
    try:
        await store.submit([workload.new_rollout(n) for n in range(1, LIVE + 1)])
    finally:
        await store.close()
    (born,) = (guard for guard in triggers.GUARDS if guard.name == _BORN)
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        connection.execute("PRAGMA synchronous = 0")
        connection.execute(f"DROP TRIGGER {_BORN}")
        connection.execute(_LOAD, {"count": finished, "digest": "0" * 64})
        connection.execute(triggers.sqlite(born))
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    finally:
        connection.close()


def plan(path: Path) -> str:
    """Return how the engine finds what a claim may take."""
    connection = sqlite3.connect(path)
    try:
        return "; ".join(str(row[3]) for row in connection.execute(_PLAN))
    finally:
        connection.close()


async def _claim_s(store: Store) -> float:
    """Claim a batch, give it back, and return how long the claim took."""
    started = time.perf_counter()
    leases = await store.claim(limit=CLAIM)
    took = time.perf_counter() - started
    if len(leases) != CLAIM:
        raise RuntimeError(f"{len(leases)} of {CLAIM} rollouts were claimed")
    await asyncio.gather(
        *(store.record(lease, give_back=rows.GiveBack(outcome="interrupted")) for lease in leases)
    )
    return took


async def _scan_s(store: Store) -> float:
    started = time.perf_counter()
    found = await store.history.sql(_SCAN, limit=LIVE + 1, timeout_s=60)
    took = time.perf_counter() - started
    if len(found.rows) != LIVE:
        raise RuntimeError(f"{len(found.rows)} of {LIVE} live rollouts were found")
    return took


async def _resume_s(store: Store) -> float:
    """Return how long it takes to claim a thousand rollouts whose owner went away without a word."""
    await store.claim(limit=CRASHED, ttl_s=0)
    await asyncio.sleep(0.01)
    started = time.perf_counter()
    leases = await store.claim(limit=CRASHED, ttl_s=0)
    took = time.perf_counter() - started
    if len(leases) != CRASHED or {lease.previous for lease in leases} != {"crashed"}:
        raise RuntimeError(f"{len(leases)} of {CRASHED} crashed rollouts were claimed")
    await asyncio.sleep(0.01)
    return took


async def measure(folder: Path, finished: tuple[int, int], rounds: int) -> dict[str, list[float]]:
    """Return seconds per claim and per scan beside few and many finished rollouts, a value per round, interleaved.

    `resume` is what claiming a thousand crashed ones takes beside the many.
    """
    paths = [folder / f"finished-{count}.db" for count in finished]
    for path, count in zip(paths, finished, strict=True):
        await _make(path, count)
    stores = [await workload.open_store(f"sqlite:///{path}") for path in paths]
    times: dict[str, list[float]] = {f"{what}_{size}": [] for what in ("claim", "scan") for size in SIZES}
    try:
        for number in range(rounds + 1):
            for store, size in zip(stores, SIZES, strict=True):
                claims = [await _claim_s(store) for _ in range(5)]
                scans = [await _scan_s(store) for _ in range(5)]
                if number:  # the first round warms both up
                    times[f"claim_{size}"].append(statistics.median(claims))
                    times[f"scan_{size}"].append(statistics.median(scans))
        times["resume"] = [await _resume_s(stores[-1]) for _ in range(3)]
    finally:
        for store in stores:
            await store.close()
    return times
