"""`rollouts resume`: what a killed process left goes on from where it is, once, and everything else is told."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator import errors
from orchestrator.cli import plan, resume
from orchestrator.settings import Settings
from store import rows
from tests.integration.cli.test_cli_run import endpoint, slow

if TYPE_CHECKING:
    from collections.abc import Callable

    from store.rollouts import Store
    from tests.conftest import Database
    from tests.integration.cli.conftest import Command

REWARDS = "select sample, reward from rollouts join rewards on rollout_id = id order by 1"


async def killed_at(command: Command, steps: int, *more: str) -> None:
    """Start three samples of recorded turns and kill the process once so many steps are stored."""
    process = await command.start(
        "run", command.offline, "--model", command.replay, "-n", "3", "-j", "1", "--run", "killed", *more
    )
    while not command.database.exists() or command.query("select count(*) from sqlite_master") == [["0"]]:
        await asyncio.sleep(0.02)
    while int(command.query("select count(*) from steps")[0][0]) < steps:
        assert process.returncode is None, await process.communicate()
        await asyncio.sleep(0.005)
    process.kill()
    await process.communicate()


@pytest.mark.long
async def test_a_killed_run_is_resumed_to_the_rewards_of_an_undisturbed_one_and_only_once(command: Command):
    await killed_at(command, 2)
    planned = await asyncio.to_thread(command, "resume", "--dry-run", "--json")
    plan = [json.loads(line) for line in planned.stdout.splitlines()]
    assert [row["blocked"] for row in plan] == ["", "", ""]
    assert {row["state"] for row in plan} <= {"created", "agent_running", "patched", "graded"}
    assert command.query("select max(fence) from rollouts") == [["1"]], "a plan changes nothing"
    resumed = await asyncio.to_thread(command, "resume", "--json")
    assert resumed.returncode == 0, resumed.stderr
    ended = [json.loads(line) for line in resumed.stdout.splitlines()]
    assert {(row["now"], row["message"]) for row in ended} == {("released", "")}
    assert command.query(REWARDS) == [["0", "1.0"], ["1", "0.0"], ["2", "0.0"]]
    assert command.query("select count(*) from sandbox_leaks") == [["0"]]
    assert command.query("select max(crash_count) from rollouts") == [["1"]]
    again = await asyncio.to_thread(command, "resume")
    assert (again.returncode, again.stdout) == (0, "")
    assert "nothing to resume" in again.stderr


@pytest.mark.long
async def test_two_resumes_at_once_share_the_work_and_the_same_run_command_resumes_too(command: Command):
    await killed_at(command, 1)
    both = await asyncio.gather(*(command.start("resume", "--json") for _ in range(2)))
    said = [await process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert command.query(REWARDS) == [["0", "1.0"], ["1", "0.0"], ["2", "0.0"]]
    assert command.query("select count(*) from grades where verdict = 1") == [["3"]]
    assert command.query("select max(fence) from rollouts") == [["2"]]


@pytest.mark.long
async def test_what_cannot_go_on_here_is_left_with_the_reason_and_costs_no_budget(command: Command):
    command.environ["MY_KEY"] = "sk-planted"
    async with slow(600.0) as server:
        process = await command.start(
            "run",
            command.offline,
            *endpoint(server),
            "--api-key-env",
            "MY_KEY",
            "--run",
            "keyed",
            *command.own_root,
        )
        await server.wait_for(lambda s: len(s.requests) == 1)
        held = await asyncio.to_thread(command, "resume", "--json")
        assert held.returncode == 0, held.stderr
        assert "worker" in held.stderr
        process.kill()
        await process.communicate()
        del command.environ["MY_KEY"]
        before = command.query("select fence, crash_count, state from rollouts")
        left = await asyncio.to_thread(command, "resume")
        assert left.returncode == 1
        assert "MY_KEY is not set" in left.stderr
        assert command.query("select fence, crash_count, state from rollouts") == before
    command.environ["MY_KEY"] = "sk-planted"
    gone = await asyncio.to_thread(command, "resume")
    assert gone.returncode == 1
    assert "cannot be reached" in gone.stderr
    assert command.query("select fence, crash_count, state from rollouts") == before


CALL = """
import asyncio, json, sys
from aweagent.lifecycle import run_agent_with_reward
print(asyncio.run(run_agent_with_reward(json.loads(sys.argv[1]), agent_type="swe", agent_config="train",
    result_dir="logs", override_api_key=sys.argv[3], override_base_url=sys.argv[2], override_llm_model=None,
    override_opencode_provider=None, override_codex_provider=None)))
"""


@pytest.mark.long
async def test_a_trainers_rollout_ends_as_worker_lost_without_a_reward_when_its_process_died(
    command: Command,
):
    record = json.dumps(
        {
            "instance_id": "offline__wordcount-1", "dataset_kind": "local", "repo": "example/wordcount",
            "repo_path": str(command.offline / "repo"), "workdir": "/testbed", "strict": True, "targets": ["tests"],
            "problem_statement": "x", "test_patch": (command.offline / "test.patch").read_text(),
            **json.loads((command.offline / "tests.json").read_text()),
        }
    )  # fmt: skip
    async with slow(600.0, times=1) as server:
        base_url = server.base_url("any", 0)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CALL, record, base_url, "session-key-1", cwd=command.folder,
            env={**command.environment(), "ROLLOUTS_DATABASE_URL": f"sqlite:///{command.database}"}, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        await server.wait_for(lambda s: len(s.requests) == 1)
        process.kill()
        await process.communicate()
    assert command.query("select state, endpoint_kind from rollouts") == [["agent_running", "session"]]
    resumed = await asyncio.to_thread(command, "resume", "--json")
    assert resumed.returncode == 1, resumed.stderr
    assert command.query("select state, failure_class from rollouts") == [["failed", "worker_lost"]]
    assert command.query("select count(*) from rewards") == [["0"]]
    assert command.query("select status, count(*) from sandboxes group by 1") == [["released", "1"]]


@pytest.mark.parametrize(
    ("state", "is_blocked", "needs"),
    [("patched", True, False), ("graded", False, False), ("created", True, True)],
)
async def test_a_rollout_needs_its_repository_until_it_is_graded_and_its_turns_until_it_has_a_patch(
    store: Store,
    new_rollout: Callable[..., rows.NewRollout],
    state: str,
    is_blocked: bool,
    needs: bool,
):
    gone = {
        "repo_source": {"kind": "tree", "path": "/nowhere/repo"},
        "origin": {"replay": "/nowhere/turns.yaml"},
    }
    new = new_rollout(input={"settings": Settings().model_dump(mode="json"), **gone})
    await store.submit([new])
    await moved_to(store, state)
    (item,) = await plan.make(store, ids=None, run=None, user=None)
    assert ("/nowhere/repo is not here" in item.blocked) is is_blocked
    async with AsyncExitStack() as stack:
        if needs:
            with pytest.raises(errors.UsageError, match=r"turns\.yaml cannot be read"):
                await resume._endpoints(stack, [item])
        else:
            await resume._endpoints(stack, [item])


async def moved_to(store: Store, state: str) -> None:
    """Walk the store's only rollout to a state and give it back."""
    (lease,) = await store.claim(limit=1)
    line = ("created", "sandbox_ready", "agent_running", "patched", "graded")
    for trigger in ("provision", "start_agent", "take_patch", "grade")[: line.index(state)]:
        moved = await store.transition(lease, trigger, op_id=trigger)
        assert isinstance(moved, rows.Applied)
        lease = replace(lease, version=moved.version)
    await store.record(lease, give_back=rows.GiveBack(outcome="interrupted"))


@pytest.mark.long
def test_a_rollout_that_is_over_is_told_so(finished: tuple[Command, Any]):
    command, _ = finished
    rollout_id, run = command.query("select id, run_id from rollouts where sample = 0")[0]
    told = command("resume", rollout_id)
    assert (told.returncode, told.stderr) == (0, f"rollout {rollout_id} is released already: reward 1.0\n")
    other = command("resume", rollout_id, "--run", "another")
    assert f"is not of run 'another' but of '{run}'" in other.stderr


@pytest.mark.parametrize(
    ("state", "status", "is_blocked"),
    [("patched", "releasing", False), ("patched", "live", True), ("graded", "releasing", True)],
)
async def test_only_a_graded_rollout_waits_for_a_sandbox_that_was_given_up_on_a_lost_machine(
    store: Store, database: Database, new_rollout: Callable[..., rows.NewRollout], state: str, status: str, is_blocked: bool
):  # fmt: skip
    new = new_rollout(input={"settings": Settings().model_dump(mode="json"), "origin": {}})
    await store.submit([new])
    await moved_to(store, state)
    database.ask(f"""INSERT INTO sandboxes (key, rollout_id, fence, role, provider, provider_ref, status, ttl_s,
        intent_at, create_deadline, release_attempts)
      VALUES ('rw-01234567-box-0-1', '{new.id}', 0, 'task', 'local', 'local:gone:boot:1-2:/x', '{status}', 60, 1, 1, 0)""")
    (item,) = await plan.make(store, ids=None, run=None, user=None)
    assert bool(item.blocked) is is_blocked
    assert ("rw-01234567-box-0-1" in item.blocked) is is_blocked


@pytest.mark.parametrize(
    ("now", "reward", "blocked", "code"),
    [
        ("released", 0.0, "", 0),
        ("graded", 1.0, "", 1),
        ("failed", None, "", 1),
        ("released", None, "", 1),
        ("released", 1.0, "its repository is not here", 1),
    ],
)
def test_the_exit_code_is_0_only_when_all_are_over_with_a_reward(
    now: str, reward: float | None, blocked: str, code: int
):
    item = plan.Item(row={"id": "1", "held": False}, given=None, action="none", blocked=blocked)
    assert resume.exit_code([{"now": now, "reward": reward}], [item]) == code
