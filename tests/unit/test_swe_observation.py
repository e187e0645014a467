"""What the model sees of tool output."""

from __future__ import annotations

import pytest

from orchestrator.agents.swe.observation import show_command, truncate
from orchestrator.agents.swe.toolbox import TOOLS, use
from orchestrator.agents.swe.tools.base import ToolContext
from orchestrator.sandbox.base import CommandResult
from orchestrator.settings import AgentSettings
from orchestrator.testing.sandbox import FakeSandbox


def result(output: bytes, **changes):
    fields = {"exit_code": 0, "output_bytes": len(output), "timed_out": False, "duration_s": 0.0}
    return CommandResult(**{**fields, "output": output, **changes})


def test_ten_thousand_characters_are_shown_whole():
    text = "x" * 10_000
    assert truncate(text, 10_000) == (text, False)


def test_one_more_character_costs_the_middle():
    text = "a" * 5000 + "-" + "b" * 5000
    shown, cut = truncate(text, 10_000)
    assert cut
    assert shown == "a" * 5000 + "\n[... 1 characters left out ...]\n" + "b" * 5000


def test_what_the_sandbox_dropped_is_counted_too():
    shown, cut = show_command(result(b"ab", output_bytes=100), 10_000, 60)
    assert cut
    assert "98 bytes left out" in shown
    assert shown.startswith("[exit code 0]\na\n")
    assert shown.endswith("\nb")


def test_bytes_that_are_not_utf8_are_shown_as_replacement_characters():
    assert show_command(result(b"ok \xff\xfe"), 100, 60) == ("[exit code 0]\nok \ufffd\ufffd", False)


def test_exit_code_and_silence_are_shown():
    assert show_command(result(b"", exit_code=3), 100, 60)[0] == "[exit code 3]\n(no output)"


def test_a_timeout_is_said_first():
    shown, _ = show_command(result(b"so far", exit_code=None, timed_out=True), 100, 2.5)
    assert shown.startswith("[timed out: killed after 2.5 s")
    assert shown.endswith("so far")


@pytest.fixture
def call(tmp_path):
    sandbox = FakeSandbox(tmp_path)

    async def run(name, *, remaining_s=60.0, **arguments):
        context = ToolContext(sandbox=sandbox, settings=AgentSettings(), remaining_s=remaining_s)
        return await use(TOOLS[name], TOOLS[name].arguments.model_validate(arguments), context)

    return run


async def test_bash_keeps_directory_and_variables(call):
    await call("bash", command="mkdir sub && cd sub && export COLOUR=green")
    assert (await call("bash", command="basename $PWD; echo $COLOUR")).text == "[exit code 0]\nsub\ngreen\n"


async def test_bash_is_never_given_more_than_the_rest_of_the_run(call):
    answer = await call("bash", remaining_s=0.3, command="echo begun; sleep 30", timeout=500)
    assert answer.timed_out
    assert "killed after 0.3 s" in answer.text
    assert "begun" in answer.text


async def test_a_nul_in_a_command_is_an_answer_not_a_crash(call):
    assert "NUL" in (await call("bash", command="echo \0")).text


async def test_view_numbers_the_lines_and_create_never_overwrites(call):
    assert "Made a/b.txt" in (await call("create", path="a/b.txt", content="one\ntwo\nthree\n")).text
    assert "exists already" in (await call("create", path="a/b.txt", content="")).text
    shown = (await call("view", path="a/b.txt", first_line=2)).text
    assert shown == "     2  two\n     3  three"
    assert "has 3 lines" in (await call("view", path="a/b.txt", first_line=9)).text
    assert "outside" in (await call("create", path="../x", content="")).text
