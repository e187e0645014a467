"""The conformance suite: what each staleness is answered with, and what the database refuses, on every kind of database."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa

from store import errors, rows, schema

if TYPE_CHECKING:
    from collections.abc import Callable

    from store.rollouts import Store
    from tests.conftest import Database

pytestmark = pytest.mark.databases

LINE = ["provision", "start_agent", "take_patch", "grade", "release"]


@pytest.fixture
async def lease(store: Store, new_rollout: Callable[..., rows.NewRollout]) -> rows.Lease:
    await store.submit([new_rollout()])
    (claimed,) = await store.claim(limit=1, run_id="run")
    return claimed


def at(lease: rows.Lease, version: int) -> rows.Lease:
    return rows.Lease(
        rollout_id=lease.rollout_id,
        fence=lease.fence,
        attempt_no=lease.attempt_no,
        version=version,
        state="",
        previous=None,
    )


async def state_of(store: Store, lease: rows.Lease) -> tuple[str, int, int]:
    row = await store.history.rollout(lease.rollout_id)
    assert row is not None
    log = await store.history.of_rollout("transitions", lease.rollout_id)
    return row["state"], row["version"], len(log)


async def test_a_rollout_walks_the_line_and_every_move_is_logged(store: Store, lease: rows.Lease):
    for version, trigger in enumerate(LINE):
        moved = await store.transition(at(lease, version), trigger, op_id=f"op-{version}")
        assert isinstance(moved, rows.Applied)
    log = await store.history.of_rollout("transitions", lease.rollout_id)
    assert [(t["seq"], t["trig"]) for t in log] == list(enumerate(LINE, 1))
    assert await state_of(store, lease) == ("released", 5, 5)


async def test_an_illegal_edge_is_refused_and_nothing_is_stored(store: Store, lease: rows.Lease):
    with pytest.raises(errors.IllegalTransition, match="grade"):
        await store.transition(lease, "grade", op_id="x")
    assert await state_of(store, lease) == ("created", 0, 0)


async def test_the_same_write_again_is_already_applied(store: Store, lease: rows.Lease):
    assert isinstance(await store.transition(lease, "provision", op_id="one"), rows.Applied)
    again = await store.transition(lease, "provision", op_id="one")
    assert again == rows.AlreadyApplied(version=1, state="sandbox_ready")
    assert await state_of(store, lease) == ("sandbox_ready", 1, 1)


async def test_another_write_of_a_used_version_is_a_conflict(store: Store, lease: rows.Lease):
    await store.transition(lease, "provision", op_id="one")
    refused = await store.transition(lease, "fail", op_id="two", failure=("internal", "x"))
    assert refused == rows.VersionConflict(version=1, state="sandbox_ready")


async def test_of_a_hundred_concurrent_writers_of_one_version_exactly_one_applies(
    store: Store, lease: rows.Lease
):
    tries = [store.transition(lease, "provision", op_id=f"op-{n}") for n in range(100)]
    outcomes = await asyncio.gather(*tries)
    assert sum(isinstance(o, rows.Applied) for o in outcomes) == 1
    assert await state_of(store, lease) == ("sandbox_ready", 1, 1)


async def test_a_stale_worker_can_change_nothing(open_store, new_rollout, database: Database):
    clock = "(SELECT CAST(value AS BIGINT) FROM schema_meta WHERE key = 'clock')"
    plain = await open_store()
    database.ask("INSERT INTO schema_meta VALUES ('clock', '1000')")
    old = await open_store(now_sql=clock)
    try:
        await old.submit([new_rollout()])
        (stale,) = await old.claim(limit=1, run_id="run", ttl_s=60)
        assert await old.claim(limit=1, run_id="run") == []
        await set_clock(plain, "61001")
        assert await old.transition(stale, "provision", op_id="late") == rows.LeaseExpired()
        (fresh,) = await old.claim(limit=1, run_id="run", ttl_s=60)
        assert (fresh.fence, fresh.previous) == (2, "crashed")
        assert await old.transition(stale, "provision", op_id="late") == rows.LeaseLost(fence=2)
        step = rows.StepRow(name="turn-0001", output={})
        assert await old.record(stale, [step]) == rows.LeaseLost(fence=2)
        assert not await old.reacquire(stale)
        assert await old.history.of_rollout("steps", stale.rollout_id) == []
        attempts = await old.history.of_rollout("attempts", stale.rollout_id)
        assert [a["outcome"] for a in attempts] == ["crashed", None]
    finally:
        await old.close()
        await plain.close()


async def set_clock(store: Store, value: str) -> None:
    update = sa.update(schema.schema_meta).where(schema.schema_meta.c.key == "clock").values(value=value)
    await store._writer.write("record", lambda c: c.execute(update))


async def test_a_failed_rollout_is_terminal_and_refuses_every_write(store: Store, lease: rows.Lease):
    await store.transition(lease, "fail", op_id="f", failure=("internal", "boom"))
    assert await store.transition(at(lease, 1), "provision", op_id="x") == rows.Terminal(state="failed")
    assert await store.record(lease, [rows.StepRow(name="s", output={})]) == rows.Terminal(state="failed")
    row = await store.history.rollout(lease.rollout_id)
    assert row is not None
    assert (row["failure_class"], row["failure_msg"], row["lease_owner"]) == ("internal", "boom", None)


async def test_a_rollout_with_an_open_sandbox_cannot_be_released(store: Store, lease: rows.Lease):
    for version, trigger in enumerate(LINE[:-1]):
        await store.transition(at(lease, version), trigger, op_id=f"op-{version}")
    intent = rows.SandboxIntent(
        key="rw-1",
        role="task",
        provider="local",
        provider_ref="here",
        env_name=None,
        ttl_s=60,
        create_timeout_s=5,
    )
    await store.record(lease, [intent])
    with pytest.raises(errors.Conflict, match="rw-1"):
        await store.transition(at(lease, 4), "release", op_id="r")
    await store.record(lease, [rows.SandboxReleasing()])
    assert await store.close_sandbox("rw-1", "folder removed")
    assert not await store.close_sandbox("rw-1", "again")
    assert isinstance(await store.transition(at(lease, 4), "release", op_id="r2"), rows.Applied)


async def test_one_bad_write_in_a_batch_fails_alone(store: Store, new_rollout):
    await store.submit([new_rollout() for _ in range(20)])
    leases = await store.claim(limit=20, run_id="run")
    twice = [rows.StepRow(name="same", output={}), rows.StepRow(name="same", output={})]
    extras = [twice if n == 7 else [rows.StepRow(name="one", output={})] for n in range(20)]
    results = await asyncio.gather(
        *(
            store.transition(lease, "provision", op_id="p", extra=e)
            for lease, e in zip(leases, extras, strict=True)
        ),
        return_exceptions=True,
    )
    assert [n for n, r in enumerate(results) if isinstance(r, BaseException)] == [7]
    assert await state_of(store, leases[7]) == ("created", 0, 0)
    assert await state_of(store, leases[8]) == ("sandbox_ready", 1, 1)


async def test_a_cancelled_caller_does_not_withdraw_its_write(store: Store, lease: rows.Lease):
    task = asyncio.create_task(store.transition(lease, "provision", op_id="p"))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    again = await store.transition(lease, "provision", op_id="p")
    assert again == rows.AlreadyApplied(version=1, state="sandbox_ready")


async def test_a_repeated_submit_attaches_and_a_changed_one_conflicts(store: Store, new_rollout):
    first = new_rollout(idem_key="k")
    assert await store.submit([first]) == [(first.id, True)]
    assert await store.submit([new_rollout(idem_key="k")]) == [(first.id, False)]
    with pytest.raises(errors.Conflict, match=first.id):
        await store.submit([new_rollout(), new_rollout(idem_key="k", request_sha256="other")])
    assert len(await store.history.overview(run_id="run")) == 1


async def test_two_stores_on_one_file_never_claim_the_same_rollout(open_store, new_rollout):
    one, two = await open_store(), await open_store()
    try:
        await one.submit([new_rollout() for _ in range(40)])
        claimed = await asyncio.gather(
            *(s.claim(limit=2, run_id="run") for _ in range(10) for s in (one, two))
        )
        ids = [lease.rollout_id for batch in claimed for lease in batch]
        assert len(ids) == 40
        assert len(set(ids)) == 40
    finally:
        await one.close()
        await two.close()


async def test_rollouts_of_a_later_state_machine_are_left_to_newer_programs(open_store, new_rollout):
    old, new = await open_store(), await open_store(fsm_version=2)
    await new.submit([new_rollout(fsm_version=version) for version in (1, 2)])
    assert [len(await one.claim(limit=9, run_id="run")) for one in (old, new)] == [1, 1]
    for one in (old, new):
        await one.close()


async def test_an_interrupted_attempt_costs_no_budget_and_a_later_claim_waits_for_its_time(
    store: Store, lease
):
    await store.record(lease, give_back=rows.GiveBack(outcome="interrupted"))
    (again,) = await store.claim(limit=1, run_id="run")
    assert (again.fence, again.attempt_no, again.previous) == (2, 2, "interrupted")
    await store.record(again, give_back=rows.GiveBack(outcome="failed", delay_ms=60_000, spend="infra"))
    assert await store.claim(limit=1, run_id="run") == []
    row = await store.history.rollout(lease.rollout_id)
    assert row is not None
    assert (row["crash_count"], row["infra_count"], row["grade_count"]) == (0, 1, 0)


OF_RUN = "WHERE run_id = 'run'"
REFUSED = [
    ("UPDATE transitions SET trig = 'grade'", "append-only"),
    ("DELETE FROM transitions", "keeps its rows"),
    (f"UPDATE rollouts SET state = 'graded', version = version + 1 {OF_RUN}", "no such edge"),
    (f"UPDATE rollouts SET state = 'agent_running' {OF_RUN}", "version by one"),
    (f"UPDATE rollouts SET lease_until = 5, lease_owner = NULL {OF_RUN}", "CHECK"),
    (f"UPDATE rollouts SET finished_at = 5 {OF_RUN}", "CHECK"),
    (f"UPDATE rollouts SET state = 'nowhere', version = version + 1 {OF_RUN}", "no such edge|CHECK"),
    ("DELETE FROM rollouts", "keeps its rows"),
    (
        f"""INSERT INTO transitions SELECT rollout_id, 9, 'created', 'grade', 'graded', 1, 'a', 'o', 0, '{{}}'
            FROM transitions JOIN rollouts ON id = rollout_id {OF_RUN}""",
        "FOREIGN KEY",
    ),
    ("DELETE FROM fsm_edges", "keeps its rows"),
    ("UPDATE grades SET reward = 1.0", "append-only"),
    ("UPDATE rewards SET reward = 1.0", "append-only"),
]


async def test_the_database_itself_refuses_what_history_does_not_allow(
    store: Store, lease: rows.Lease, database: Database
):
    await store.transition(lease, "provision", op_id="p")
    await grade_once(store, lease)
    for statement, why in REFUSED:
        with pytest.raises(database.refusal, match=f"(?i){why}"):
            database.ask(statement)


async def grade_once(store: Store, lease: rows.Lease, **columns: Any) -> rows.Outcome:
    base: dict[str, Any] = {
        "grade_id": "g1", "patch_sha256": "p", "grader_digest": "d", "grader": "eval", "grader_version": "1",
        "reason": "first", "outcome": "unresolved", "verdict": True, "reward": 0.0, "mask_sample": False,
        "evidence": "junit", "f2p_pass": 0, "f2p_total": 1, "p2p_pass": 1, "p2p_total": 1,
        "test_map": rows.Artifact.of(b"{}"), "log": rows.Artifact.of(b"log"), "exit_code": 1, "task_sha256": "task",
        "eval_sha256": "eval", "isolation": "bwrap", "sandbox_key": None, "flags": [], "duration_s": 0.5,
    }  # fmt: skip
    grade = rows.GradeRow(**(base | columns))
    reward = rows.RewardRow(
        grade_id=grade.grade_id,
        reward=grade.reward,
        invalid_reason=None if grade.reward is not None else "masked",
        reward_fn_version="resolved@1",
        outcome_table=1,
        stats={},
    )
    return await store.record(lease, [grade, reward])


async def test_a_masked_grade_cannot_carry_a_number(store: Store, lease: rows.Lease):
    with pytest.raises(sa.exc.IntegrityError, match="no_masked_number"):
        await grade_once(store, lease, mask_sample=True, reward=0.0)


async def test_a_grade_without_verdict_cannot_carry_a_number(store: Store, lease: rows.Lease):
    with pytest.raises(sa.exc.IntegrityError, match="no_reward_without_verdict"):
        await grade_once(store, lease, verdict=False, reward=0.0, outcome="grader_error")


async def test_a_second_first_verdict_of_the_same_patch_and_grader_is_refused(
    store: Store, lease: rows.Lease
):
    await grade_once(store, lease)
    with pytest.raises(sa.exc.IntegrityError):
        await grade_once(store, lease, grade_id="g2")


async def test_equal_artifacts_are_stored_once_and_come_back_whole(store: Store, lease: rows.Lease):
    await grade_once(store, lease, log=rows.Artifact.of(b"x" * 100_000))
    kept = rows.Artifact.of(b"x" * 100_000)
    assert len(kept.stored) < 1000
    assert await store.history.artifact(kept.sha256) == b"x" * 100_000
    noise = bytes(range(256))
    assert rows.unpack(rows.Artifact.of(noise).codec, rows.Artifact.of(noise).stored) == noise


async def test_a_closed_store_refuses_writes(open_store, new_rollout):
    opened = await open_store()
    await opened.close()
    with pytest.raises(errors.StoreClosed):
        await opened.submit([new_rollout()])


async def test_sixteen_workers_may_open_a_new_store_at_once(open_store):
    stores = await asyncio.gather(*(open_store("fresh.db") for _ in range(16)))
    try:
        assert len({s.uuid for s in stores}) == 1
        found = await stores[0].history.sql("SELECT count(*) FROM workers", limit=1, timeout_s=5)
        assert found.rows == [(16,)]
    finally:
        for opened in stores:
            await opened.close()
