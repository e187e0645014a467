"""The built-in agent in the real local sandbox: the example turns, and what an agent can do to its own shell."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.errors import ExitReason, IsolationRefused
from orchestrator.sandbox.base import Role, SandboxSpec
from orchestrator.sandbox.local import LocalProvider
from orchestrator.settings import AgentSettings, SandboxSettings, cache_dir
from orchestrator.tasks.record import DatasetKind, RepoSource, Task
from orchestrator.testing.model_server import ScriptedModel
from orchestrator.testing.replay import load_replay
from orchestrator.testing.tryout import INSTANCE, TryOut, calling, script

if TYPE_CHECKING:
    from orchestrator.agents.base import AgentExit

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
OFFLINE = "offline__wordcount-1"


@pytest.fixture
async def tryout(tmp_path):
    tree = tmp_path / "tree"
    shutil.copytree(EXAMPLES / "tasks" / OFFLINE / "repo", tree)
    (tree / "crlf.txt").write_bytes(b"one\r\ntwo\r\n")
    (tree / "crlf.txt").chmod(0o755)
    (tree / "outward").symlink_to("/etc")
    provider = LocalProvider(SandboxSettings(root=tmp_path / "boxes"), cache_dir=cache_dir())
    try:
        await provider.preflight()
    except IsolationRefused as refused:
        pytest.skip(f"no isolation on this machine: {refused}")
    task = Task(
        instance_id=OFFLINE,
        dataset_kind=DatasetKind.LOCAL,
        workdir="/testbed",
        repo_source=RepoSource(kind="tree", path=tree),
        problem_statement="Words with an apostrophe are torn apart.",
    )
    sandbox = await provider.create(SandboxSpec(key="rw-try-0-0-0", role=Role.TASK, task=task))
    yield TryOut(sandbox=sandbox)
    await sandbox.stop()
    await provider.release("rw-try-0-0-0")
    await provider.close()


async def play(tryout: TryOut, *turns: dict[str, Any]) -> AgentExit:
    async with ScriptedModel(script(*turns)) as server:
        over = await tryout.run(server.base_url(INSTANCE))
    assert server.violations == []
    return over


def answers(tryout: TryOut) -> list[str]:
    return [message["content"] for message in tryout.recorder.messages if message["role"] == "tool"]


@pytest.mark.parametrize(
    ("sample", "counted"),
    [(0, {"don't": 1, "quoted": 1}), (1, {"don't": 1, "'quoted'": 1}), (2, {"don": 1, "t": 1, "quoted": 1})],
    ids=["solves", "wrong", "idle"],
)
async def test_the_recorded_turns_do_what_their_scenario_says(tryout, sample, counted):
    async with ScriptedModel(load_replay(EXAMPLES / "replay.yaml")) as server:
        over = await tryout.run(server.base_url(OFFLINE, sample))
    assert over.reason is ExitReason.SUBMITTED
    count = "from wordcount import count_words; print(count_words(\"don't 'quoted'\"))"
    result = await tryout.sandbox.run(["python", "-c", count], timeout_s=30)
    assert result.output.decode().strip() == str(counted)


def test_every_example_task_has_its_three_scenarios():
    replayed = load_replay(EXAMPLES / "replay.yaml").scenarios
    tasks = {path.parent.name for path in (EXAMPLES / "tasks").glob("*/task.yaml")}
    assert set(replayed) == tasks
    for scenarios in replayed.values():
        assert [scenario.name for scenario in scenarios] == ["solves", "wrong", "idle"]


async def test_edits_keep_form_and_stay_inside(tryout):
    await play(
        tryout,
        calling("search_replace", path="crlf.txt", old_str="one\ntwo", new_str="one\nthree"),
        calling("bash", command="od -c crlf.txt | head -2; stat -c %a crlf.txt"),
        calling("search_replace", path="outward/hostname", old_str="a", new_str="b"),
        calling("create", path="new/file.txt", content="x\n"),
        calling("bash", command="cat new/file.txt"),
        calling("submit"),
    )
    edited, shown, outward, made, read, _ = answers(tryout)
    assert edited == "Replaced 1 in crlf.txt, line 1."
    assert "t   h   r   e   e  \\r  \\n" in shown
    assert shown.endswith("755\n")
    assert "outside /testbed" in outward
    assert made.startswith("Made")
    assert read == "[exit code 0]\nx\n"


@pytest.mark.parametrize(
    "command",
    [
        "kill -9 $$",
        "exit 3",
        "exec true",
        "kill -9 -1",
        "exec 1>&- 2>&- 0<&-",
        "ulimit -n 1",
        "cd / && rm -rf /testbed",
    ],
)
async def test_an_agent_that_breaks_its_shell_still_gets_an_answer_or_a_named_end(tryout, command):
    tryout.settings = AgentSettings(tools=("bash", "submit"), command_timeout_s=2)
    over = await play(
        tryout, calling("bash", command=command), calling("bash", command="echo on"), calling("submit")
    )
    assert over.reason in {ExitReason.SUBMITTED, ExitReason.AGENT_DESTROYED_SANDBOX}
    if over.reason is ExitReason.SUBMITTED:
        assert answers(tryout)[1].endswith("on\n")


async def test_a_detached_child_that_keeps_the_output_open_does_not_hold_the_call(tryout):
    over = await play(
        tryout,
        calling("bash", command="setsid sleep 300 & echo begun"),
        calling("bash", command="setsid sleep 300", timeout=0.5),
        calling("bash", command="pwd"),
        calling("submit"),
    )
    assert over.reason is ExitReason.SUBMITTED
    first, second, third, _ = answers(tryout)
    assert first.startswith("[exit code 0]\nbegun")
    assert "timed out" in second
    assert third == "[exit code 0]\n/testbed\n"


async def test_neither_key_nor_endpoint_is_in_the_sandbox(tryout):
    tryout.api_key = "sk-planted-secret"
    await play(tryout, calling("bash", command="env; cat /proc/1/environ; ls -A ~"), calling("submit"))
    seen = answers(tryout)[0]
    assert "sk-planted-secret" not in seen
    assert "127.0.0.1" not in seen
    assert "OPENAI" not in seen
