"""A rollout from submission to release: what is stored on the good path and on every bad one."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import TYPE_CHECKING, Any, Self

import pytest

from orchestrator import errors, rollout
from orchestrator.errors import FailureClass, GradeOutcome
from orchestrator.rollout import walk
from orchestrator.states import State
from orchestrator.tasks.record import Task
from orchestrator.testing.faults import failing
from store import rows

if TYPE_CHECKING:
    from pathlib import Path

    from tests.integration.conftest import Machine

SUBMIT: dict[str, Any] = {"tool_calls": [{"name": "submit", "arguments": {}}]}
FIX = r"""sed -i "s/\[a-z\]+\"/[a-z]+(?:'[a-z]+)*\"/" wordcount/counting.py"""


def bash(command: str) -> dict[str, Any]:
    return {"tool_calls": [{"name": "bash", "arguments": {"command": command}}]}


async def count(machine: Machine, query: str) -> int:
    found = await machine.store.history.sql(query, limit=1, timeout_s=5)
    return int(found.rows[0][0])


async def test_a_solving_agent_ends_released_with_reward_one(machine: Machine):
    ending = await machine.play(bash(FIX), SUBMIT)
    graded = await machine.rows("grades", ending.rollout_id)
    assert (ending.state, ending.reward) == (State.RELEASED, 1.0), (ending.stats, graded)
    assert machine.moves == [
        State.SANDBOX_READY, State.AGENT_RUNNING, State.PATCHED, State.GRADED, State.RELEASED,
    ]  # fmt: skip
    assert ending.stats is not None
    assert ending.stats["exit_reason"] == "submitted"
    assert (ending.stats["n_steps"], ending.stats["n_llm_calls"], ending.stats["resolved"]) == (2, 2, 1)
    assert (ending.stats["f2p_pass"], ending.stats["f2p_total"]) == (2, 2)
    boxes = await machine.rows("sandboxes", ending.rollout_id)
    assert [(b["role"], b["status"]) for b in boxes] == [("task", "released"), ("grading", "released")]
    assert all(b["proof"] for b in boxes)
    await machine.check_nothing_is_left()


async def test_the_task_sandbox_is_given_up_before_the_grading_sandbox_is_asked_for(machine: Machine):
    ending = await machine.play(bash(FIX), SUBMIT)
    task, grading = await machine.rows("sandboxes", ending.rollout_id)
    assert task["released_at"] <= grading["intent_at"]


async def test_a_wrong_patch_is_worth_nothing_and_is_a_result(machine: Machine):
    ending = await machine.play(bash("echo '# no' >> wordcount/counting.py"), SUBMIT)
    assert (ending.state, ending.reward) == (State.RELEASED, 0.0)
    assert ending.stats is not None
    assert ending.stats["grade_outcome"] == GradeOutcome.UNRESOLVED


async def test_an_empty_patch_is_graded_without_a_sandbox(machine: Machine):
    ending = await machine.play(bash("ls"), SUBMIT)
    assert (ending.state, ending.reward) == (State.RELEASED, 0.0)
    assert ending.stats is not None
    assert (ending.stats["grade_outcome"], ending.stats["patch_empty"]) == (GradeOutcome.EMPTY_PATCH, 1)
    assert [b["role"] for b in await machine.rows("sandboxes", ending.rollout_id)] == ["task"]


async def test_a_limit_still_extracts_and_grades_the_patch(machine: Machine):
    ending = await machine.play(bash(FIX), bash("ls"), bash("ls"), agent__step_limit=2)
    assert ending.reward == 1.0
    assert ending.stats is not None
    assert ending.stats["exit_reason"] == "step_limit"


async def test_a_create_that_fails_is_tried_again_and_paid_from_the_infra_budget(machine: Machine):
    machine.provider.fault = failing("create:task", 1, 2)
    ending = await machine.play(bash(FIX), SUBMIT)
    row = await machine.store.history.rollout(ending.rollout_id)
    assert row is not None
    assert (ending.reward, row["infra_count"], row["attempts"]) == (1.0, 2, 3)
    await machine.check_nothing_is_left()


async def test_a_provider_that_never_creates_ends_in_failure_without_a_reward(machine: Machine):
    machine.provider.fault = failing("create:task")
    ending = await machine.play(SUBMIT)
    assert (ending.state, ending.reward) == (State.FAILED, None)
    assert ending.failure_class == FailureClass.SANDBOX_CREATE_FAILED
    attempts = await machine.rows("attempts", ending.rollout_id)
    assert len(attempts) == 1 + errors.BUDGETS[errors.Budget.INFRA]
    assert await machine.rows("rewards", ending.rollout_id) == []
    await machine.check_nothing_is_left()


async def test_an_endpoint_that_is_down_costs_attempts_and_never_becomes_a_reward(machine: Machine):
    rollout_id = await machine.submit()
    machine.base_url = "http://127.0.0.1:9/v1"
    ending = await rollout.run(machine.runtime, rollout_id)
    assert (ending.state, ending.reward, ending.failure_class) == (
        State.FAILED,
        None,
        FailureClass.LLM_UNREACHABLE,
    )
    log = [t["trig"] for t in await machine.rows("transitions", rollout_id)]
    assert log.count("restart") == errors.BUDGETS[errors.Budget.INFRA]
    await machine.check_nothing_is_left()


async def test_a_dead_session_fails_at_once(machine: Machine):
    ending = await machine.play({"content": "x", "fault": {"status": 401, "body": "{}"}})
    assert (ending.state, ending.failure_class) == (State.FAILED, FailureClass.LLM_SESSION_GONE)
    assert len(await machine.rows("attempts", ending.rollout_id)) == 1
    await machine.check_nothing_is_left()


async def test_a_grading_sandbox_that_fails_twice_leaves_one_effective_grade(machine: Machine):
    machine.provider.fault = failing("create:grading", 1, 2)
    ending = await machine.play(bash(FIX), SUBMIT)
    assert ending.reward == 1.0
    assert await count(machine, "SELECT count(*) FROM grades WHERE verdict = 1") == 1
    assert await count(machine, "SELECT count(*) FROM llm_calls") == 2
    await machine.check_nothing_is_left()


async def test_a_release_that_cannot_be_proven_keeps_the_reward_and_is_tried_again(machine: Machine):
    machine.provider.fault = failing("release")
    rollout_id = await machine.submit()
    lease = (await machine.store.claim(limit=1))[0]
    async with asyncio.timeout(30):
        pending = await advance(machine, lease, bash(FIX), SUBMIT)
    assert (pending.state, pending.again_in_s is not None) == (State.GRADED, True)
    (reward,) = await machine.rows("rewards", rollout_id)
    assert reward["reward"] == 1.0
    machine.provider.fault = lambda _call, _number: None
    await machine.store.record(lease, give_back=rows.GiveBack(outcome="failed"))
    (again,) = await claim_when_due(machine, rollout_id)
    assert (await advance(machine, again)).state is State.RELEASED
    await machine.check_nothing_is_left()


async def advance(machine: Machine, lease: rows.Lease, *turns: dict[str, Any]) -> rollout.Ending:
    from orchestrator.testing.model_server import ScriptedModel
    from orchestrator.testing.replay import parse_replay

    async with ScriptedModel(parse_replay({"*": [{"name": "scripted", "turns": list(turns)}]})) as server:
        machine.base_url = server.base_url("any", 0)
        return await rollout.advance(machine.runtime, lease)


async def claim_when_due(machine: Machine, rollout_id: str) -> list[rows.Lease]:
    import sqlalchemy as sa

    from store.schema import rollouts

    make_due = sa.update(rollouts).where(rollouts.c.id == rollout_id).values(not_before=0)
    await machine.store._writer.write("record", lambda c: c.execute(make_due))
    return await machine.store.claim(limit=1, ids=[rollout_id])


async def test_a_cancelled_run_gives_the_attempt_back_and_a_later_one_finishes(machine: Machine):
    rollout_id = await machine.submit()
    running = asyncio.create_task(machine.serve(rollout_id, bash("sleep 60"), SUBMIT))
    await until(lambda: State.AGENT_RUNNING in machine.moves)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    (attempt,) = await machine.rows("attempts", rollout_id)
    assert attempt["outcome"] == "interrupted"
    await machine.check_nothing_is_left()
    ending = await machine.serve(rollout_id, bash(FIX), SUBMIT)
    row = await machine.store.history.rollout(rollout_id)
    assert row is not None
    assert (ending.reward, row["crash_count"], row["infra_count"]) == (1.0, 0, 0)
    assert "restart" in [t["trig"] for t in await machine.rows("transitions", rollout_id)]


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_patched_rollout_of_a_dead_worker_is_graded_without_a_model_call(machine: Machine):
    machine.provider.fault = failing("create:grading")
    rollout_id = await machine.submit()
    (lease,) = await machine.store.claim(limit=1)
    await advance_to_patched(machine, lease)
    machine.provider.fault = lambda _call, _number: None
    calls = await count(machine, "SELECT count(*) FROM llm_calls")
    machine.base_url = "http://127.0.0.1:9/v1"
    ending = await rollout.run(machine.runtime, rollout_id)
    assert (ending.state, ending.reward) == (State.RELEASED, 1.0)
    assert await count(machine, "SELECT count(*) FROM llm_calls") == calls


async def advance_to_patched(machine: Machine, lease: rows.Lease) -> None:
    ending = await advance(machine, lease, bash(FIX), SUBMIT)
    assert ending.state is State.PATCHED


async def test_a_rollout_that_kills_its_workers_ends_as_worker_lost(machine: Machine):
    rollout_id = await machine.submit()
    for _ in range(1 + errors.BUDGETS[errors.Budget.CRASH]):
        await machine.store.claim(limit=1, ids=[rollout_id], ttl_s=-1)
    ending = await rollout.run(machine.runtime, rollout_id)
    assert (ending.state, ending.failure_class) == (State.FAILED, FailureClass.WORKER_LOST)


async def test_a_hanging_eval_script_masks_the_sample_because_the_no_op_hangs_too(machine: Machine):
    hanging = machine.task.model_copy(
        update={
            "strict": False,
            "eval_script": "sleep 300",
            "timeout_s": 1.0,
            "fail_to_pass": (),
            "pass_to_pass": (),
        }
    )
    ending = await machine.play(bash(FIX), SUBMIT, task=hanging)
    assert (ending.state, ending.reward) == (State.RELEASED, None)
    (grade,) = await machine.rows("grades", ending.rollout_id)
    assert (grade["outcome"], grade["mask_sample"], grade["reward"]) == (GradeOutcome.TESTS_TIMEOUT, 1, None)
    (reward,) = await machine.rows("rewards", ending.rollout_id)
    assert (reward["valid"], reward["invalid_reason"]) == (0, "masked:tests_timeout")
    assert await count(machine, "SELECT count(*) FROM validations WHERE patch = 'noop'") == 1
    await machine.check_nothing_is_left()


async def test_an_agent_that_breaks_imports_feels_it_because_the_control_does_not_show_the_symptom(
    machine: Machine,
):
    spoil = bash("printf 'import os\\nos._exit(0)\\n' >> wordcount/__init__.py")
    ending = await machine.play(spoil, SUBMIT)
    (grade,) = await machine.rows("grades", ending.rollout_id)
    assert (grade["outcome"], grade["mask_sample"]) == (GradeOutcome.NO_REPORT, 0)
    assert ending.reward == 0.0


async def test_a_task_without_a_repository_is_refused_by_the_local_sandbox_with_that_reason(machine: Machine):
    image_only = machine.task.model_copy(update={"repo_source": None, "image": "registry/image:1"})
    ending = await machine.play(SUBMIT, task=image_only)
    assert (ending.state, ending.failure_class) == (State.FAILED, FailureClass.TASK_INVALID)
    assert "registry/image:1" in ending.message


async def test_an_unforeseen_error_fails_closed(machine: Machine):
    machine.provider.fault = lambda call, _n: ZeroDivisionError("surprise") if call == "create:task" else None
    ending = await machine.play(SUBMIT)
    assert (ending.state, ending.failure_class) == (State.FAILED, FailureClass.INTERNAL)
    assert "surprise" in ending.message


async def test_two_callers_of_one_rollout_share_one_walk(machine: Machine):
    rollout_id = await machine.submit()
    first = asyncio.create_task(machine.serve(rollout_id, bash(FIX), SUBMIT))
    await until(lambda: machine.moves)
    second = await rollout.run(machine.runtime, rollout_id)
    assert second.state is not State.RELEASED
    assert (await first).reward == 1.0
    assert (await rollout.run(machine.runtime, rollout_id)).reward == 1.0
    assert await count(machine, "SELECT count(*) FROM attempts") == 1


async def test_the_stats_handed_back_are_the_stored_ones(machine: Machine):
    ending = await machine.play(bash(FIX), SUBMIT)
    (reward,) = await machine.rows("rewards", ending.rollout_id)
    assert json.loads(reward["stats"]) == ending.stats
    again = await rollout.run(machine.runtime, ending.rollout_id)
    assert (again.reward, again.stats) == (ending.reward, ending.stats)


async def test_a_planted_key_is_in_no_file_of_the_store(machine: Machine, tmp_path: Path):
    await machine.play(bash(FIX), {"content": "x", "fault": {"status": 500, "body": machine.planted_key}})
    await machine.play(bash("env; cat /proc/self/environ"), SUBMIT)
    await machine.store._writer.write("record", lambda c: c.exec_driver_sql("SELECT 1").scalar())
    stored = b"".join(p.read_bytes() for p in tmp_path.glob("rollouts.db*"))
    assert b"scripted" in stored
    assert machine.planted_key.encode() not in stored


@pytest.mark.long
async def test_stored_bytes_grow_linearly_with_turns(machine: Machine):
    turns = [bash(f"seq {n} {n + 300}") for n in range(99)]
    before = await stored_bytes(machine)
    ending = await machine.play(*turns, SUBMIT)
    after = await stored_bytes(machine)
    steps = await machine.rows("steps", ending.rollout_id)
    assert len(steps) == 100
    new_messages = sum(len(s["output"]) for s in steps)
    assert after - before <= 3 * new_messages


async def stored_bytes(machine: Machine) -> int:
    def size(connection: Any) -> int:
        pages, page_size = (
            connection.exec_driver_sql(f"PRAGMA {p}").scalar() for p in ("page_count", "page_size")
        )
        return int(pages) * int(page_size)

    return await machine.store._writer.write("record", size)


async def test_no_record_is_digested_or_read_back_on_the_event_loop(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
):
    used: dict[str, set[int]] = {"digest": set(), "read": set()}

    class Watched(Task):
        def to_json(self) -> str:
            used["digest"].add(threading.get_ident())
            return super().to_json()

        @classmethod
        def model_validate_json(cls, *given: Any, **more: Any) -> Self:
            used["read"].add(threading.get_ident())
            return super().model_validate_json(*given, **more)

    monkeypatch.setattr(walk, "Task", Watched)
    ending = await machine.play(SUBMIT, task=Watched(**machine.task.model_dump()))
    assert ending.state is State.RELEASED
    assert all(used.values()), used
    assert not any(threading.get_ident() in threads for threads in used.values())
