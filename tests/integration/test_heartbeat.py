from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from store.heartbeat import Heartbeat

if TYPE_CHECKING:
    from store.rollouts import Store


async def test_a_renewed_lease_is_told_nothing_and_a_lost_one_is_told_once(store: Store, new_rollout):
    await store.submit([new_rollout(), new_rollout()])
    kept, lost = await store.claim(limit=2, ttl_s=30)
    said: list[tuple[str, str]] = []
    heartbeat = Heartbeat(store)
    heartbeat.hold(kept, lambda why: said.append(("kept", why)))
    heartbeat.hold(lost, lambda why: said.append(("lost", why)))
    await store._writer.write(
        "record",
        lambda c: c.exec_driver_sql("UPDATE rollouts SET fence = fence + 1 WHERE id = ?", (lost.rollout_id,)),
    )
    before = await lease_until(store, kept.rollout_id)
    heartbeat.beat()
    await asyncio.sleep(0)
    heartbeat.beat()
    await asyncio.sleep(0)
    assert said == [("lost", "lost")]
    assert await lease_until(store, kept.rollout_id) > before


async def lease_until(store: Store, rollout_id: str) -> int:
    row = await store.history.rollout(rollout_id)
    assert row is not None
    return int(row["lease_until"])


async def test_a_cancel_request_arrives_with_the_next_renewal(store: Store, new_rollout):
    await store.submit([new_rollout()])
    (lease,) = await store.claim(limit=1)
    said: list[str] = []
    heartbeat = Heartbeat(store)
    heartbeat.hold(lease, said.append)
    await store._writer.write(
        "record",
        lambda c: c.exec_driver_sql(
            "UPDATE rollouts SET cancel_requested_at = 1 WHERE id = ?", (lease.rollout_id,)
        ),
    )
    heartbeat.beat()
    await asyncio.sleep(0)
    assert said == ["cancelled"]


async def test_a_dropped_lease_is_renewed_no_more(store: Store, new_rollout):
    await store.submit([new_rollout()])
    (lease,) = await store.claim(limit=1, ttl_s=30)
    heartbeat = Heartbeat(store)
    heartbeat.hold(lease, lambda _why: None)
    heartbeat.drop(lease)
    before = await lease_until(store, lease.rollout_id)
    heartbeat.beat()
    await asyncio.sleep(0)
    assert await lease_until(store, lease.rollout_id) == before


async def test_a_process_that_stood_still_is_not_sure_of_a_lease_until_it_is_renewed(
    store: Store, new_rollout
):
    await store.submit([new_rollout()])
    (lease,) = await store.claim(limit=1)
    now_s = 0.0
    heartbeat = Heartbeat(store, clock=lambda: now_s)
    assert not heartbeat.is_sure(lease)
    heartbeat.hold(lease, lambda _why: None)
    now_s = store.ttl_s - 1
    assert heartbeat.is_sure(lease)
    assert not heartbeat.is_sure(replace(lease, fence=lease.fence + 1))
    now_s = store.ttl_s
    assert not heartbeat.is_sure(lease)
    heartbeat.beat()
    assert heartbeat.is_sure(lease)
    heartbeat.drop(lease)
    assert not heartbeat.is_sure(lease)
