"""A database with rollouts and sandboxes of every odd kind, for what `rollouts status` has to tell."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from store import rows, standing

if TYPE_CHECKING:
    from store.rollouts import Store
    from tests.conftest import Database


class World:
    """Rows of every odd kind, some of them written past the store."""

    def __init__(self, store: Store, database: Database, new_rollout: Any) -> None:
        self.store, self._database, self._new = store, database, new_rollout
        self.now = store.dialect.now_sql
        self._count = 0

    def ask(self, query: str) -> list[tuple[Any, ...]]:
        return self._database.ask(query.replace("NOW", self.now))

    async def created(self, instance: str = "demo__demo-1") -> str:
        new = self._new(instance_id=instance)
        await self.store.submit([new])
        return str(new.id)

    async def claimed(self) -> tuple[str, rows.Lease]:
        (lease,) = await self.store.claim(limit=1, ids=[await self.created()])
        return lease.rollout_id, lease

    async def given_back(self, delay_ms: int) -> str:
        rollout_id, lease = await self.claimed()
        await self.store.record(lease, give_back=rows.GiveBack(outcome="interrupted", delay_ms=delay_ms))
        return rollout_id

    async def stale(self) -> str:
        rollout_id, _ = await self.claimed()
        self.ask(f"UPDATE rollouts SET lease_until = NOW - 5 WHERE id = '{rollout_id}'")
        return rollout_id

    async def released(self) -> None:
        _, lease = await self.claimed()
        for trigger in ("provision", "start_agent", "take_patch", "grade", "release"):
            moved = await self.store.transition(lease, trigger, op_id=trigger)
            assert isinstance(moved, rows.Applied)
            lease = replace(lease, version=moved.version)

    async def failed(self, failure_class: str, ago_ms: int = 5, *, endpoint_kind: str = "stateless") -> str:
        """Add a rollout that failed; it has kept its lease, which must count for nothing."""
        rollout_id = await self.created()
        self.ask(
            "UPDATE rollouts SET state = 'failed', version = version + 1, lease_owner = 'w', lease_until = NOW + 60000,"
            f" endpoint_kind = '{endpoint_kind}', failure_class = '{failure_class}', finished_at = NOW - {ago_ms} WHERE id = '{rollout_id}'"
        )
        return rollout_id

    async def graded(self, instance: str, *, masked: bool) -> None:
        """Add a rollout with its reward; what is masked is its effective grade, and a second one is not."""
        rollout_id = await self.created(instance)
        ((blob,),) = self.ask("SELECT min(sha256) FROM artifacts")
        for run_no, mask in ((1, masked), (2, not masked)):
            self.ask(f"""INSERT INTO grades (grade_id, rollout_id, fence, patch_sha256, grader_digest, run_no, reason,
                outcome, verdict, reward, mask_sample, evidence, f2p_pass, f2p_total, p2p_pass, p2p_total, test_map,
                log, grader, grader_version, task_sha256, eval_sha256, flags, duration_s, ended_at)
              VALUES ('{rollout_id}-{run_no}', '{rollout_id}', 1, 'p', 'g', {run_no},
                '{"first" if run_no == 1 else "regrade"}', 'no_report', 1, {"NULL" if mask else "0.0"}, {int(mask)},
                'none', 0, 0, 0, 0, '{blob}', '{blob}', 'g', '1', 't', 'e', '[]', 1.0, NOW)""")
        number, reason = ("NULL", "'masked'") if masked else ("0.0", "NULL")
        self.ask(f"""INSERT INTO rewards (rollout_id, grade_id, reward, valid, invalid_reason, reward_fn_version,
            outcome_table, stats, stats_sha256, at)
          VALUES ('{rollout_id}', '{rollout_id}-1', {number}, {int(not masked)}, {reason}, '1', 1, '{{}}', 's', NOW)""")

    def sandbox(self, rollout_id: str | None, status: str, asked_ago_ms: int = 0, tries: int = 0) -> None:
        """Add a row of the ledger; without a rollout it belongs to this store's worker."""
        self._count += 1
        owner = (rollout_id or self.store.worker.worker_id).replace("-", "")
        asked = f"NOW - {asked_ago_ms}" if asked_ago_ms else "NULL"
        self.ask(f"""INSERT INTO sandboxes (key, rollout_id, fence, role, provider, provider_ref, status, ttl_s,
            intent_at, create_deadline, release_requested_at, release_attempts, proof)
          VALUES ('rw-01234567-{owner}-0-{self._count}', {f"'{rollout_id}'" if rollout_id else "NULL"}, 0, 'task',
            'local', 'there', '{status}', 60, NOW, NOW, {asked}, {tries},
            {"'gone'" if status == "released" else "NULL"})""")

    async def look(self) -> standing.Standing:
        return await self.store.history.standing()
