"""Ways in which the durable core could be wrong, each with the test that must notice it."""

from __future__ import annotations

from dataclasses import dataclass

GUARDS = "tests/mutations/test_guards.py::"
CUSTODY = "tests/integration/model/test_custody_order.py::"
DRIVER = "tests/integration/test_driver.py::"


@dataclass(frozen=True, slots=True)
class Mutation:
    """One change of one file: `old`, which must be there exactly once, becomes `new`."""

    name: str
    file: str
    old: str
    new: str
    killer: str


MUTATIONS = (
    Mutation(
        "no fence in the WHERE of a move",
        "store/guarded.py",
        "AND rollouts.version = item.v AND rollouts.fence = item.f",
        "AND rollouts.version = item.v",
        GUARDS + "test_a_move_under_an_old_fence_changes_nothing",
    ),
    Mutation(
        "no fence in the WHERE of evidence",
        "store/guarded.py",
        "rollouts.id = item.i AND rollouts.fence = item.f\n",
        "rollouts.id = item.i\n",
        GUARDS + "test_evidence_under_an_old_fence_changes_nothing",
    ),
    Mutation(
        "no version in the WHERE",
        "store/guarded.py",
        "AND rollouts.version = item.v AND rollouts.fence = item.f",
        "AND rollouts.fence = item.f",
        GUARDS + "test_a_move_from_an_old_version_changes_nothing",
    ),
    Mutation(
        "no lease in the WHERE of a move",
        "store/guarded.py",
        "AND rollouts.lease_until > {now} AND e.src = rollouts.state",
        "AND e.src = rollouts.state",
        GUARDS + "test_a_lease_that_ran_out_changes_nothing",
    ),
    Mutation(
        "no lease in the WHERE of evidence",
        "store/guarded.py",
        "AND rollouts.lease_until > {{now}} AND rollouts.state NOT IN",
        "AND rollouts.state NOT IN",
        GUARDS + "test_a_lease_that_ran_out_changes_nothing",
    ),
    Mutation(
        "no edge in the WHERE",
        "store/guarded.py",
        "AND rollouts.lease_until > {now} AND e.src = rollouts.state",
        "AND rollouts.lease_until > {now}",
        GUARDS + "test_a_trigger_without_an_edge_is_an_error",
    ),
    Mutation(
        "no ledger in the WHERE",
        "store/guarded.py",
        "AND NOT (e.dst = 'released' AND EXISTS (",
        "AND NOT (e.dst = 'nowhere' AND EXISTS (",
        GUARDS + "test_an_open_sandbox_keeps_a_rollout_from_being_released",
    ),
    Mutation(
        "a claim that keeps the fence",
        "store/leases.py",
        "SET fence = rollouts.fence + 1,",
        "SET fence = rollouts.fence + (rollouts.fence = 0),",
        GUARDS + "test_a_claim_raises_the_fence",
    ),
    Mutation(
        "a heartbeat that renews other fences",
        "store/leases.py",
        "WHERE rollouts.id = item.i AND rollouts.fence = item.f AND rollouts.lease_owner = :worker\n    AND",
        "WHERE rollouts.id = item.i AND rollouts.lease_owner = :worker\n    AND",
        GUARDS + "test_a_heartbeat_extends_only_the_fence_it_names",
    ),
    Mutation(
        "a lease taken back under another fence",
        "store/leases.py",
        "WHERE rollouts.id = item.i AND rollouts.fence = item.f AND rollouts.lease_owner = :worker\n  RETURNING",
        "WHERE rollouts.id = item.i AND rollouts.lease_owner = :worker\n  RETURNING",
        GUARDS + "test_a_heartbeat_extends_only_the_fence_it_names",
    ),
    Mutation(
        "the worker's clock for the database's",
        "store/leases.py",
        "return int(connection.execute(sa.select(dialect.now)).scalar_one())",
        "return __import__('time').time_ns() // 1_000_000",
        GUARDS + "test_every_time_is_the_databases_time",
    ),
    Mutation(
        "synchronous NORMAL for FULL",
        "store/engine.py",
        '_pragma(connection, "synchronous", 2)',
        '_pragma(connection, "synchronous", 1)',
        GUARDS + "test_the_writers_connection_waits_for_the_disk",
    ),
    Mutation(
        "an answer before the COMMIT",
        "store/writer.py",
        "            self._computed = (items, results)\n",
        "            [item.answer(result) for item, result in zip(items, results, strict=True)]\n",
        GUARDS + "test_nobody_is_answered_before_the_commit",
    ),
    Mutation(
        "no mark of the last batch",
        "store/writer.py",
        "or self._mark() != self._batch_no",
        "or self._mark() != -1",
        GUARDS + "test_a_claim_whose_commit_was_not_answered_is_not_made_twice",
    ),
    Mutation(
        "no order within a rollout",
        "store/changes.py",
        "waiting = list(range(len(changes)))",
        "waiting = list(reversed(range(len(changes))))",
        GUARDS + "test_moves_of_one_rollout_that_were_queued_together_are_made_in_their_order",
    ),
    Mutation(
        "a retry that may delete evidence (trigger gone)",
        "migrations/versions/0002_evidence.py",
        'for table in (*_APPEND_ONLY, "validations"):',
        'for table in ("validations",):',
        GUARDS + "test_the_database_keeps_the_evidence_of_every_attempt",
    ),
    Mutation(
        "an edge `fail` from graded",
        "orchestrator/states.py",
        "for s in (State.CREATED, State.SANDBOX_READY, State.AGENT_RUNNING, State.PATCHED)\n",
        "for s in (State.CREATED, State.SANDBOX_READY, State.AGENT_RUNNING, State.PATCHED, State.GRADED)\n",
        GUARDS + "test_only_release_leaves_graded",
    ),
    Mutation(
        "a row closed that nobody gave up",
        "store/ledger.py",
        "WHERE key = :key AND status = 'releasing' RETURNING key",
        "WHERE key = :key RETURNING key",
        GUARDS + "test_only_a_sandbox_that_was_given_up_can_be_closed",
    ),
    Mutation(
        "create before intent",
        "orchestrator/rollout/walk.py",
        "        await self.note([custody.intent_of(self.runtime, spec)])\n",
        "        made = await custody.make(self.runtime, spec)\n"
        "        await self.note([custody.intent_of(self.runtime, spec)])\n"
        "        return made\n",
        CUSTODY + "test_the_intent_is_durable_before_the_create_call_goes_out",
    ),
    Mutation(
        "a sandbox taken over from an owner who may live",
        "orchestrator/rollout/takeover.py",
        'if not await _owners_are_dead(walk, since=boxes[0]["fence"]):',
        "if False:",
        "tests/integration/durability/test_takeover.py::test_an_owner_that_is_out_of_sight_may_live_and_keeps_its_sandbox_to_itself",
    ),
    Mutation(
        "a transcript that its sandbox may be ahead of",
        "orchestrator/rollout/transcript.py",
        "name not in known and any(",
        "False and any(",
        "tests/integration/durability/test_takeover.py::"
        "test_the_work_of_a_dead_worker_goes_on_after_its_last_step_unless_the_sandbox_may_be_ahead[at the second answer]",
    ),
    Mutation(
        "a step whose sandbox did not answer taken for a whole one",
        "orchestrator/rollout/transcript.py",
        'if any(output.get("sandbox_lost") for output in outputs):',
        "if False:",
        "tests/unit/test_transcript.py::test_a_step_in_which_the_sandbox_did_not_answer_is_no_step_to_go_on_after",
    ),
    Mutation(
        "`released` before the confirmation",
        "orchestrator/rollout/custody.py",
        '        failpoints.hit("sandbox.before_release")\n',
        '        await store.close_sandbox(key, "gone")\n',
        CUSTODY + "test_a_sandbox_whose_removal_failed_stays_open_in_the_ledger",
    ),
    Mutation(
        "a provider that failed taken for one that found nothing",
        "orchestrator/rollout/custody.py",
        "await store.note_failed_release(key, str(e), found)",
        "await store.close_sandbox(key, str(e))",
        CUSTODY + "test_a_sandbox_whose_removal_failed_stays_open_in_the_ledger",
    ),
    Mutation(
        "a swallowed cancellation",
        "orchestrator/rollout/driver.py",
        "        await _to_its_end(_give_back_or_fail(walk))\n        raise\n",
        "        await _to_its_end(_give_back_or_fail(walk))\n",
        DRIVER + "test_a_cancelled_run_gives_the_attempt_back_and_a_later_one_finishes",
    ),
)
"""The list; textual, so that a change of the code that outdates one is noticed."""
