"""One real database that a model test plays on: two workers, a clock that stands still, and the rows as plain facts."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import sqlalchemy as sa

from store import engine, leases, rows, workers
from store.dialect import Dialect
from store.rollouts import Store
from tests.integration.model.store_model import EDGES, TTL_S

CLOCK = "(SELECT CAST(value AS BIGINT) FROM schema_meta WHERE key = 'clock')"
WORKERS = (0, 1)
_ROWS = """SELECT id, state, version, fence, lease_owner, lease_until, not_before, cancel_requested_at, crash_count,
    infra_count, grade_count, finished_at IS NOT NULL FROM rollouts WHERE run_id = :run"""
_PARTS = (
    ("transitions", "t.seq, t.trig, t.op_id, t.fence", "t.seq"),
    ("attempts", "t.fence, t.outcome", "t.fence"),
    ("sandboxes", "t.key, t.fence, t.status", "t.key"),
    ("steps", "t.name", "t.name"),
    ("rewards", "t.grade_id", "t.grade_id"),
)


class Bench:
    """One database, its clock, and two workers on it; used by all examples of a test."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.runner = asyncio.Runner()
        self.numbers = itertools.count(1)
        self.said: Counter[str] = Counter()
        parsed = engine.parse_url(url)
        edges = {(src, trigger, dst) for (src, trigger), dst in EDGES.items()}
        engine.prepare(parsed, edges, store_uuid="0" * 32)
        self.reader = sa.create_engine(
            engine.plain(parsed), isolation_level="AUTOCOMMIT", poolclass=sa.pool.StaticPool
        )
        self.ask("INSERT INTO schema_meta VALUES ('clock', '1000000')")
        self.process = workers.this_process("")
        self.stores = [self.open_worker() for _ in WORKERS]

    def open_worker(self) -> Store:
        """Open a store under a new worker id, without the checks of a first open."""
        worker = replace(self.process, worker_id=self.name("worker"))
        parsed = engine.parse_url(self.url)
        dialect = Dialect.of(parsed, CLOCK)

        async def opened() -> Store:
            store = Store(
                parsed,
                worker=worker,
                uuid="0" * 32,
                dialect=dialect,
                fsm_version=1,
                ttl_s=TTL_S,
                outage_s=5.0,
            )
            await store._writer.write("register", lambda c: leases.register(c, dialect, worker))
            return store

        store: Store = self.run(opened())
        return store

    def name(self, what: str) -> str:
        return f"{what}-{next(self.numbers):09d}"

    def run(self, call: Any) -> Any:
        return self.runner.run(call)

    def ask(self, query: str, **values: object) -> list[tuple[Any, ...]]:
        with self.reader.connect() as connection:
            done = connection.execute(sa.text(query), values)
            return [tuple(row) for row in done] if done.returns_rows else []

    def kill(self, worker: int) -> None:
        """End a worker as a crash does: its connections go, nothing is written."""
        self.run(self.stores[worker]._writer.close())
        self.run(self.stores[worker].history.close())
        self.stores[worker] = self.open_worker()

    def stored(self, run_id: str) -> dict[str, tuple[Any, ...]]:
        """Return what the database holds of a run, in the shape of `store_model.facts`."""
        found: dict[str, list[Any]] = {row[0]: [row[1:]] for row in self.ask(_ROWS, run=run_id)}
        for table, columns, order in _PARTS:
            parts: dict[str, list[Any]] = {rollout_id: [] for rollout_id in found}
            query = f"""SELECT r.id, {columns} FROM {table} t JOIN rollouts r ON r.id = t.rollout_id
                WHERE r.run_id = :run ORDER BY {order}"""
            for rollout_id, *values in self.ask(query, run=run_id):
                parts[rollout_id].append(tuple(values) if len(values) > 1 else values[0])
            for rollout_id, entries in parts.items():
                found[rollout_id].append(tuple(entries))
        return {rollout_id: tuple(facts) for rollout_id, facts in found.items()}

    def close(self) -> None:
        for store in self.stores:
            self.run(store.close())
        self.reader.dispose()
        self.runner.close()


def request(name: str, run_id: str) -> rows.NewRollout:
    return rows.NewRollout(
        id=name, idem_key=name, request_sha256="request", run_id=run_id, instance_id="demo__demo-1", task_sha256="task",
        task_json="{}", dataset_kind="local", eval_sha256="eval", agent_type="swe", config_sha256="config",
        endpoint_kind="stateless", input={}, fsm_version=1, outcome_table=1,
    )  # fmt: skip


def intent(key: str) -> rows.SandboxIntent:
    return rows.SandboxIntent(
        key=key, role="task", provider="local", provider_ref="here", env_name=None, ttl_s=60, create_timeout_s=5
    )  # fmt: skip


def grade(name: str) -> tuple[rows.Row, ...]:
    empty = rows.Artifact.of(b"")
    grade = rows.GradeRow(
        grade_id=name, patch_sha256=name, grader_digest="g", grader="g", grader_version="1", reason="first",
        outcome="resolved", verdict=True, reward=1.0, mask_sample=False, evidence="junit", f2p_pass=1, f2p_total=1,
        p2p_pass=0, p2p_total=0, test_map=empty, log=empty, exit_code=0, task_sha256="task", eval_sha256="eval",
        isolation=None, sandbox_key=None, flags=[], duration_s=1.0,
    )  # fmt: skip
    reward = rows.RewardRow(
        grade_id=name, reward=1.0, invalid_reason=None, reward_fn_version="1", outcome_table=1, stats={}
    )
    return grade, reward
