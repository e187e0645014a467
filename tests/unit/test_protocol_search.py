"""Every interleaving of two workers, a sweeper and a slow provider, searched; and what each rule of the protocol is for."""

from __future__ import annotations

import dataclasses
import sys

import pytest

from orchestrator.testing import protocol

NEEDED = {
    "fence_in_where": "a stale worker changed something",
    "version_in_where": "a write was applied to a state its writer had not seen",
    "lease_in_where": "a worker wrote after its lease had run out",
    "ledger_in_where": "a rollout is released while a sandbox of it exists",
    "reacquire_checks_fence": "a lease was taken back that somebody else owns",
    "intent_before_create": "a sandbox exists without an open ledger row",
    "confirmed_before_released": "a sandbox exists without an open ledger row",
    "failed_list_is_not_empty": "a sandbox exists without an open ledger row",
    "late_creations_awaited": "a sandbox exists without an open ledger row",
    "creations_end_by_deadline": "a sandbox exists without an open ledger row",
    "graded_never_fails": "a recorded reward was lost",
}
"""Rule -> what breaks without it."""


def told(found: protocol.Found) -> str:
    return "\n".join([f"{found.broken} ({found.states} states):", *(f"  {step}" for step in found.trace)])


@pytest.mark.long
def test_no_interleaving_of_the_protocol_breaks_an_invariant():
    found = protocol.search(protocol.Rules())
    sys.stdout.write(f"searched {found.states} states over {found.steps} steps\n")
    assert not found.broken, told(found)
    assert found.states > 10_000


@pytest.mark.long
@pytest.mark.timeout(600)
def test_no_interleaving_of_three_claims_breaks_an_invariant():
    found = protocol.search(protocol.Rules(), claims=3, late_writes=False)
    sys.stdout.write(f"searched {found.states} states over {found.steps} steps\n")
    assert not found.broken, told(found)


@pytest.mark.parametrize("rule", NEEDED)
def test_without_the_rule_the_search_finds_a_way_to_break(rule: str):
    found = protocol.search(protocol.Rules(**{rule: False}))
    sys.stdout.write(told(found) + "\n")
    assert found.broken == NEEDED[rule], told(found)
    assert found.trace


def test_every_rule_is_shown_to_be_needed():
    assert set(NEEDED) == {field.name for field in dataclasses.fields(protocol.Rules)}


def test_the_counter_example_without_the_fence_is_the_overtaken_worker():
    found = protocol.search(protocol.Rules(fence_in_where=False))
    assert found.trace[:3] == ("worker 0 claims", "the lease runs out", "worker 1 claims")
    assert found.trace[3].startswith("worker 0 ")
