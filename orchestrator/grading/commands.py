"""Which command tests a task, and how its result is read: chosen from the record alone."""

from __future__ import annotations

import posixpath
import re
import shlex
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.tasks.record import Task

PLACED_SCRIPT = "test_fail_to_pass.py"
"""Where a `f2p_script` goes, below the work tree (the ScaleSWE convention)."""
START_MARKER = ">>>>> Start Test Output"
END_MARKER = ">>>>> End Test Output"
_R2E_SCRIPT = f": '{START_MARKER}'\nbash run_tests.sh\n: '{END_MARKER}'\n"
_PYTHON = 'exec "$(command -v python3 || command -v python)" "$@"'
# The runner is imported before the repository comes on the path, so that nothing in it can take the runner's name.
_PYTEST_FIRST = "import sys, pytest, _pytest.config; sys.path.insert(0, sys.argv.pop(1)); "
_RUN_PYTEST = _PYTEST_FIRST + "sys.exit(pytest.main(sys.argv[1:]))"
_RUN_FILE = _PYTEST_FIRST + "import runpy; runpy.run_path(sys.argv[1], run_name='__main__')"
# The text lives in the shell's memory alone: the file is gone before the first line runs.
_RUN_TEXT = 'text=$(cat -- "$1") && rm -f -- "$1" && set -- && eval "$text"'


class Mode(StrEnum):
    """How a task is tested."""

    STRICT = "strict"
    """Our pytest command, nothing of the repository's configuration; read as JUnit."""
    LISTED = "listed"
    """Our pytest command over the files of the listed tests, with the repository's configuration; read as JUnit."""
    EXECUTE = "execute"
    """The record's Python file, run as a program; exit code only."""
    MARKED_SCRIPT = "marked_script"
    """The record's shell text; the part between its markers is the test command, read as a log."""
    SCRIPT = "script"
    """The record's shell text; exit code only."""
    NONE = "none"
    """The record does not say how to test."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """What to run. `{out}` in `argv` stands for a folder of this run outside the repository."""

    mode: Mode
    argv: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    script: bytes | None = None
    """Text to be written to `{out}/script` first."""


def choose_mode(task: Task) -> Mode:
    """Return how the record wants to be tested; what is ours comes before what is weak."""
    if task.strict:
        return Mode.STRICT
    if task.f2p_script is not None:
        return Mode.EXECUTE if task.f2p_mode == "execute" else Mode.LISTED
    if task.eval_script is not None:
        return Mode.MARKED_SCRIPT if marker_lines(task.eval_script) else Mode.SCRIPT
    if task.expected_status is not None:
        return Mode.MARKED_SCRIPT
    return Mode.LISTED if task.fail_to_pass else Mode.NONE


def build(task: Task, workdir: str, *, start_nonce: str, end_nonce: str) -> Command:
    """Return the command for a task; the nonces frame a marked script's test output and must be new for every run."""
    mode = choose_mode(task)
    if mode is Mode.STRICT:
        return Command(
            mode=mode, argv=_strict_argv(task, workdir), env={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        )
    if mode is Mode.LISTED:
        options = ("-rA", "-p", "no:cacheprovider", f"--rootdir={workdir}", *_JUNIT)
        files = (*_files(task), *_placed(task))
        return Command(
            mode=mode, argv=(*_python("-c", _RUN_PYTEST, workdir), *options, *dict.fromkeys(files))
        )
    if mode is Mode.EXECUTE:
        return Command(mode=mode, argv=_python("-c", _RUN_FILE, workdir, f"{workdir}/{PLACED_SCRIPT}"))
    if mode is Mode.MARKED_SCRIPT:
        text = frame_tests(task.eval_script or _R2E_SCRIPT, start_nonce, end_nonce)
        return Command(
            mode=mode, argv=("bash", "-c", _RUN_TEXT, "bash", "{out}/script"), script=text.encode()
        )
    if mode is Mode.SCRIPT:
        script = (task.eval_script or "").encode()
        return Command(mode=mode, argv=("bash", "-c", _RUN_TEXT, "bash", "{out}/script"), script=script)
    return Command(mode=mode)


_JUNIT = ("-o", "junit_family=xunit1", "--junitxml={out}/junit.xml")


def _strict_argv(task: Task, workdir: str) -> tuple[str, ...]:
    roots = [posixpath.normpath(posixpath.join(workdir, root)) for root in task.import_roots]
    if task.allow_conftest:
        folders = [posixpath.join(workdir, posixpath.dirname(path)) for path in task.allow_conftest]
        conftest = f"--confcutdir={posixpath.normpath(posixpath.commonpath(folders))}"
    else:
        conftest = "--noconftest"
    return (
        *_python("-m", "pytest", "-rA", "-p", "no:cacheprovider", "-c", "/dev/null", conftest),
        f"--rootdir={workdir}",
        "-o",
        f"pythonpath={shlex.join(roots)}",
        *_JUNIT,
        *(task.targets or _files(task)),
    )


def _python(*arguments: str) -> tuple[str, ...]:
    return ("bash", "-c", _PYTHON, "python", "-I", "-B", *arguments)


def _files(task: Task) -> tuple[str, ...]:
    listed = (*task.fail_to_pass, *task.pass_to_pass)
    return tuple(dict.fromkeys(node_id.split("::", 1)[0] for node_id in listed))


def _placed(task: Task) -> tuple[str, ...]:
    return (PLACED_SCRIPT,) if task.f2p_script is not None else ()


def marker_lines(script: str) -> tuple[int, int] | None:
    """Return the line numbers of the start and end marker (`: '>>>>> Start Test Output'`, also with echo)."""
    lines = script.split("\n")
    starts, ends = (
        [n for n, line in enumerate(lines) if _is_marker(line, m)] for m in (START_MARKER, END_MARKER)
    )
    if not starts or not ends or ends[-1] <= starts[-1]:
        return None
    return starts[-1], ends[-1]


def _is_marker(line: str, marker: str) -> bool:
    return re.fullmatch(rf"\s*(?::|echo)\s+(['\"]?){re.escape(marker)}\1\s*;?\s*", line) is not None


def frame_tests(script: str, start_nonce: str, end_nonce: str) -> str:
    """Return the script so that it prints a nonce on either side of the test command and exits with its status.

    What follows the tests only cleans up, which a sandbox that is thrown away does not need, and would hide the exit
    code of the tests (SWE-bench 5 captures it at the same place). `end_nonce` shows that this point was reached.
    """
    found = marker_lines(script)
    if found is None:
        raise ValueError("the script lacks its markers")
    start, end = found
    lines = script.split("\n")
    before = [*lines[:start], f"printf '\\n%s\\n' {start_nonce}", "set +e"]
    after = ["{ _test_status=$?; } 2>/dev/null", f"printf '\\n%s\\n' {end_nonce}", 'exit "$_test_status"', ""]
    return "\n".join([*before, *lines[start + 1 : end], *after])
