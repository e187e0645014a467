"""Values that one engine takes and the other does not, and writes that come twice or out of step."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import psycopg
import pytest

from store import errors, rows
from store.heartbeat import Heartbeat

if TYPE_CHECKING:
    from store.rollouts import Store
    from tests.conftest import Database

NUL = "before\0after"
SHOWN = "before\N{SYMBOL FOR NULL}after"

BOTH = pytest.mark.databases("sqlite", "postgresql")


@pytest.fixture
async def lease(store: Store, new_rollout) -> rows.Lease:
    await store.submit([new_rollout()])
    (claimed,) = await store.claim(limit=1)
    return claimed


@BOTH
async def test_a_nul_character_in_any_text_is_stored_as_its_symbol(store: Store, lease: rows.Lease):
    patch = rows.PatchRow(
        artifact=rows.Artifact.of(b"x\0y"), base_commit="c", exit_reason="submitted", exit_message=NUL,
        paths=[NUL], notes=[NUL],
    )  # fmt: skip
    call = rows.LlmCallRow(kind="main", outcome="error", request_sha256="r", error=NUL)
    step = rows.StepRow(name="one", output={"messages": [{"content": NUL}]})
    await store.record(lease, [patch, call, step])
    back = rows.GiveBack(outcome="failed", error_class="internal", error=NUL)
    moved = await store.transition(
        lease, "fail", op_id="f", payload={"why": NUL}, give_back=back, failure=("internal", NUL)
    )
    assert isinstance(moved, rows.Applied)
    row = await store.history.rollout(lease.rollout_id)
    assert row is not None
    assert row["failure_msg"] == SHOWN

    async def only(table: str) -> dict[str, object]:
        (found,) = await store.history.of_rollout(table, lease.rollout_id)
        return dict(found)

    patches, calls, attempts = await only("patches"), await only("llm_calls"), await only("attempts")
    assert (patches["exit_message"], patches["paths"], patches["notes"]) == (SHOWN, [SHOWN], [SHOWN])
    assert (calls["error"], attempts["error"]) == (SHOWN, SHOWN)
    assert (await only("transitions"))["payload"] == {"why": SHOWN}
    assert await store.history.artifact(str(patches["artifact"])) == b"x\0y"
    assert "\\u0000" in str((await only("steps"))["output"]), "a transcript is kept to the letter"


async def reward(store: Store, lease: rows.Lease, value: float | None) -> rows.Outcome:
    return await store.record(
        lease,
        [
            rows.RewardRow(
                grade_id="g", reward=value, invalid_reason=None if value is not None else "masked",
                reward_fn_version="resolved@1", outcome_table=1, stats={"steps": 1},
            )
        ],
    )  # fmt: skip


@BOTH
async def test_an_equal_reward_may_come_again_and_another_one_is_a_conflict(store: Store, lease: rows.Lease):
    grade = rows.GradeRow(
        grade_id="g", patch_sha256="p", grader_digest="d", grader="eval", grader_version="1", reason="first",
        outcome="unresolved", verdict=True, reward=0.0, mask_sample=False, evidence="junit", f2p_pass=0, f2p_total=1,
        p2p_pass=1, p2p_total=1, test_map=rows.Artifact.of(b"{}"), log=rows.Artifact.of(b""), exit_code=1,
        task_sha256="t", eval_sha256="e", isolation="bwrap", sandbox_key=None, flags=[], duration_s=0.5,
    )  # fmt: skip
    await store.record(lease, [grade])
    for _ in range(2):
        assert isinstance(await reward(store, lease, 0.0), rows.Applied)
    for other in (1.0, None):
        with pytest.raises(errors.Conflict, match=f"{lease.rollout_id} has another reward"):
            await reward(store, lease, other)
    (stored,) = await store.history.of_rollout("rewards", lease.rollout_id)
    assert stored["reward"] == 0.0


@BOTH
async def test_writes_of_every_kind_take_place_in_the_order_they_were_made(store: Store, lease: rows.Lease):
    intent = rows.SandboxIntent(
        key="k",
        role="task",
        provider="local",
        provider_ref="here",
        env_name=None,
        ttl_s=60,
        create_timeout_s=60,
    )
    given_up = store.record(lease, [intent, rows.SandboxReleasing()])
    _, closed, last = await asyncio.gather(
        given_up, store.close_sandbox("k", "gone"), store.close_sandbox("k", "again")
    )
    assert (closed, last) == (True, False)


@BOTH
async def test_a_renewal_that_waited_for_long_itself_loses_no_lease_of_a_live_loop(
    store: Store, lease: rows.Lease
):
    now_s = [0.0]
    async with Heartbeat(store, clock=lambda: now_s[0]) as heartbeat:
        heartbeat.hold(lease, lambda _why: None)
        await asyncio.to_thread(heartbeat.beat)
        await asyncio.sleep(0)
        before = await store.history.rollout(lease.rollout_id)
        now_s[0] = store.ttl_s * 0.9
        await asyncio.to_thread(heartbeat.beat)
        after = await store.history.rollout(lease.rollout_id)
    assert before is not None
    assert after is not None
    assert after["lease_until"] > before["lease_until"]


@pytest.mark.databases("postgresql")
@pytest.mark.parametrize("trigger", ["fail", None], ids=["move", "note"])
async def test_a_lease_taken_back_while_a_write_waits_is_told_as_run_out_and_not_as_a_programming_error(
    store: Store, lease: rows.Lease, database: Database, trigger: str | None
):
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    database.ask("UPDATE rollouts SET lease_until = 1")
    with psycopg.connect(database.url) as heartbeat:
        heartbeat.execute(
            "UPDATE rollouts SET lease_until = 1 + extract(epoch FROM now())::bigint * 1000 + 60000"
        )
        write = (
            store.record(lease)
            if trigger is None
            else store.transition(lease, trigger, op_id="op", failure=("internal", "boom"))
        )
        told = asyncio.ensure_future(write)
        while database.ask(waiting) == [(0,)]:
            await asyncio.sleep(0.01)
        heartbeat.commit()
    assert await told == rows.LeaseExpired()
