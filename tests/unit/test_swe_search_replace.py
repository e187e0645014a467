"""`search_replace`: it changes exactly what was asked, or says precisely why not."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from orchestrator.agents.swe.toolbox import TOOLS, use
from orchestrator.agents.swe.tools.base import ToolContext
from orchestrator.settings import AgentSettings
from orchestrator.testing.sandbox import FakeSandbox


@pytest.fixture
def sandbox(tmp_path):
    return FakeSandbox(tmp_path)


@pytest.fixture
def replace(sandbox):
    async def run(**arguments):
        tool = TOOLS["search_replace"]
        context = ToolContext(sandbox=sandbox, settings=AgentSettings(), remaining_s=60)
        return (await use(tool, tool.arguments.model_validate(arguments), context)).text

    return run


@pytest.fixture
def work(sandbox):
    return Path(sandbox.workdir)


async def test_the_one_occurrence_is_replaced(replace, work):
    (work / "a.py").write_text("x = 1\ny = 2\n")
    assert await replace(path="a.py", old_str="y = 2", new_str="y = 3") == "Replaced 1 in a.py, line 2."
    assert (work / "a.py").read_text() == "x = 1\ny = 3\n"


async def test_an_absolute_path_and_a_new_directory_work(replace, work):
    (work / "deep").mkdir()
    (work / "deep/a").write_text("old")
    await replace(path=str(work / "deep/a"), old_str="old", new_str="new")
    assert (work / "deep/a").read_text() == "new"


async def test_text_that_is_not_there_is_answered_with_the_nearest_line(replace, work):
    (work / "a.py").write_text("import os\n\n    return self.value + 1\n")
    said = await replace(path="a.py", old_str="return self.valeu + 1", new_str="return 0")
    assert "not found" in said
    assert "line 3" in said
    assert "return self.value + 1" in said
    assert (work / "a.py").read_text() == "import os\n\n    return self.value + 1\n"


async def test_wrong_indentation_is_recognised(replace, work):
    (work / "a.py").write_text("if x:\n    return 1\nreturn 2\n")
    said = await replace(path="a.py", old_str="        return 1\n", new_str="        return 3\n")
    assert "The same words stand on line 2" in said


async def test_too_many_occurrences_are_listed_by_line(replace, work):
    (work / "a").write_text("x\ny\nx\nx\n")
    said = await replace(path="a", old_str="x", new_str="z")
    assert "occurs 3 times" in said
    assert "lines 1, 3, 4" in said
    assert (work / "a").read_text() == "x\ny\nx\nx\n"
    assert "Replaced 3" in await replace(path="a", old_str="x", new_str="z", expected_count=3)
    assert (work / "a").read_text() == "z\ny\nz\nz\n"


async def test_too_few_occurrences_change_nothing(replace, work):
    (work / "a").write_text("x\n")
    assert "expected 2" in await replace(path="a", old_str="x", new_str="z", expected_count=2)
    assert (work / "a").read_text() == "x\n"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("missing.py", "does not exist"),
        ("folder", "is a directory"),
        ("picture.png", "binary"),
        ("/etc/hostname", "outside"),
        ("../outside.txt", "outside"),
        ("link.txt", "outside"),
        ("linked_folder/outside.txt", "outside"),
        ("", "empty"),
        ("fifo", "special file"),
    ],
)
async def test_a_file_that_cannot_be_edited_is_named_with_its_cause(replace, work, tmp_path, path, expected):
    (tmp_path / "outside.txt").write_text("secret")
    (work / "folder").mkdir()
    (work / "picture.png").write_bytes(b"\x89PNG\0\1secret")
    (work / "link.txt").symlink_to(tmp_path / "outside.txt")
    (work / "linked_folder").symlink_to(tmp_path)
    os.mkfifo(work / "fifo")
    assert expected in await replace(path=path, old_str="secret", new_str="known")
    assert (tmp_path / "outside.txt").read_text() == "secret"


async def test_a_link_that_stays_inside_is_followed(replace, work):
    (work / "real").write_text("old\n")
    (work / "link").symlink_to("real")
    await replace(path="link", old_str="old", new_str="new")
    assert (work / "link").is_symlink()
    assert (work / "real").read_text() == "new\n"


@pytest.mark.parametrize(
    ("before", "old", "new", "after"),
    [
        pytest.param(b"a\r\nb\r\nc\r\n", "a\nb", "x\ny\nz", b"x\r\ny\r\nz\r\nc\r\n", id="CRLF"),
        pytest.param(b"a\r\nb\r\n", "b", "b\nc", b"a\r\nb\r\nc\r\n", id="CRLF, one line becomes two"),
        pytest.param(b"a\r\nb\nc\r\n", "b\nc", "x\ny", b"a\r\nx\ny\r\n", id="mixed, taken as written"),
        pytest.param(b"\xef\xbb\xbfimport a\n", "import a", "import b", b"\xef\xbb\xbfimport b\n", id="BOM"),
        pytest.param(b"a\nend\n", "end\n", "fin", b"a\nfin\n", id="final newline stays"),
        pytest.param(b"a\nend", "end", "fin\n", b"a\nfin", id="missing final newline stays missing"),
        pytest.param(b"a\r\nend\r\n", "end\n", "fin", b"a\r\nfin\r\n", id="CRLF final newline stays"),
        pytest.param(b"caf\xe9 old\n", "old", "new", b"caf\xe9 new\n", id="bytes that are not UTF-8 stay"),
        pytest.param(b"all\n", "all\n", "", b"", id="an emptied file is empty"),
    ],
)
async def test_the_form_of_the_file_is_kept(replace, work, before, old, new, after):
    (work / "f").write_bytes(before)
    said = await replace(path="f", old_str=old, new_str=new)
    assert said.startswith("Replaced 1")
    assert (work / "f").read_bytes() == after


async def test_the_mode_is_kept(replace, work):
    (work / "run.sh").write_text("echo old\n")
    (work / "run.sh").chmod(0o751)
    await replace(path="run.sh", old_str="old", new_str="new")
    assert stat.S_IMODE((work / "run.sh").stat().st_mode) == 0o751


async def test_an_empty_search_and_an_equal_replacement_are_refused(replace, work):
    (work / "a").write_text("x")
    assert "empty" in await replace(path="a", old_str="", new_str="y")
    assert "equal" in await replace(path="a", old_str="x", new_str="x")
