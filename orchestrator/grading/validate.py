"""Does a task measure what it claims? Gold must resolve, a patch that fixes nothing must fail every FAIL_TO_PASS test.

A listed test that passes without the fix, or a package that is imported from somewhere else than the repository,
would give rewards for nothing or withhold them for ever.
"""

from __future__ import annotations

import json
import posixpath
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from orchestrator import errors
from orchestrator.errors import GradeOutcome
from orchestrator.grading.base import Evidence

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from orchestrator.grading.base import Grade
    from orchestrator.sandbox.base import Sandbox
    from orchestrator.tasks.record import Task

NOOP_FILE = "noop-control"
_HEADER = re.compile(rb'^\+\+\+ "?b/([^"\t\n]+)', re.MULTILINE)
_FIND_SPEC = """
import importlib.util, json, sys
roots, names = json.loads(sys.argv[1]), json.loads(sys.argv[2])
sys.path[:0] = roots
found = {}
for name in names:
    spec = importlib.util.find_spec(name)
    if spec is not None:
        found[name] = spec.origin or next(iter(spec.submodule_search_locations or []), "")
print(json.dumps(found))
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Validation:
    """What validating one task found; valid when there is no reason against it."""

    instance_id: str
    reasons: list[str] = field(default_factory=list)
    known_failing: list[str] = field(default_factory=list)
    """Tests outside the lists that fail with the gold patch too."""
    flaky: list[str] = field(default_factory=list)
    """Listed tests whose status differed between runs of one patch."""

    @property
    def valid(self) -> bool:
        """True when the task may be trained on."""
        return not self.reasons


def noop_patch(task: Task) -> bytes:
    """Return a patch that changes nothing that matters: it adds a text file nobody reads."""
    name = f"{NOOP_FILE}-{task.sha256[:12]}.txt"
    return (
        f"diff --git a/{name} b/{name}\nnew file mode 100644\n--- /dev/null\n+++ b/{name}\n"
        "@@ -0,0 +1 @@\n+This file changes nothing.\n"
    ).encode()


async def module_origins(task: Task, sandbox: Sandbox, *, timeout_s: float = 60.0) -> dict[str, str]:
    """Return, for each module the gold patch changes, the file that Python in the sandbox would import.

    Only top-level modules and packages are looked up, so nothing of the task is run. Modules nobody finds are left out.
    """
    names = tested_modules(task)
    if not names:
        return {}
    roots = [posixpath.normpath(posixpath.join(sandbox.workdir, root)) for root in task.import_roots]
    python = 'exec "$(command -v python3 || command -v python)" "$@"'
    result = await sandbox.run(
        ["bash", "-c", python, "python", "-I", "-B", "-c", _FIND_SPEC, json.dumps(roots), json.dumps(names)],
        timeout_s=timeout_s,
    )
    lines = result.output.decode("utf-8", "replace").split("\n")
    if result.exit_code != 0 or len(lines) < 2:
        raise errors.GraderError(
            f"{task.instance_id}: the modules {', '.join(names)} could not be looked up: {result.output[-500:]!r}"
        )
    origins: dict[str, str] = json.loads(lines[-2])
    return origins


def tested_modules(task: Task) -> list[str]:
    """Return the top-level module or package names of the Python files that the gold patch changes."""
    names: dict[str, None] = {}
    for match in _HEADER.finditer(task.gold_patch or b""):
        path = match.group(1).decode("utf-8", "replace")
        if (name := _module(path, task.import_roots)) is not None:
            names[name] = None
    return list(names)


def _module(path: str, roots: Sequence[str]) -> str | None:
    if not path.endswith(".py"):
        return None
    for root in sorted((posixpath.normpath(root) for root in roots), key=len, reverse=True):
        inside = path if root == "." else path.removeprefix(f"{root}/")
        if root == "." or inside != path:
            name = inside.removesuffix(".py").split("/")[0]
            return name if name.isidentifier() and name not in {"setup", "conftest"} else None
    return None


def compare(
    task: Task, *, gold: Sequence[Grade], noop: Sequence[Grade], origins: Mapping[str, str], workdir: str
) -> Validation:
    """Judge a task by the grades of its gold patch and of the no-op patch, any number of runs each."""
    reasons: list[str] = []
    if task.gold_patch is not None and not gold:
        reasons.append("the gold patch was not graded")
    if not noop:
        reasons.append("the no-op patch was not graded")
    for grade in gold:
        if grade.outcome is not GradeOutcome.RESOLVED:
            failing = ", ".join(_not_passed(task, grade)[:5])
            reasons.append(
                f"gold is {grade.outcome.value}, not resolved" + (f": {failing}" if failing else "")
            )
    for grade in noop:
        reasons += _noop_reasons(task, grade)
    for name, origin in origins.items():
        if origin != workdir and not origin.startswith(f"{workdir}/"):
            reasons.append(f"module {name} is imported from {origin}, not from {workdir}")
    flaky = sorted({*_differing(task, gold), *_differing(task, noop)})
    if flaky:
        reasons.append(f"flaky: {', '.join(flaky[:5])}")
    return Validation(
        instance_id=task.instance_id,
        reasons=list(dict.fromkeys(reasons)),
        known_failing=_failing_outside(task, gold),
        flaky=flaky,
    )


def _noop_reasons(task: Task, grade: Grade) -> list[str]:
    if grade.outcome is not GradeOutcome.UNRESOLVED:
        return [f"the no-op patch is {grade.outcome.value}, not unresolved"]
    if grade.evidence in {Evidence.EXIT_CODE, Evidence.EXPECTED_MAP}:
        return []  # says nothing about single tests, or the map already decided
    passing = [name for name in task.fail_to_pass if grade.tests.get(name) == "PASSED"]
    broken = [name for name in task.pass_to_pass if grade.tests.get(name) != "PASSED"]
    reasons = []
    if passing:
        reasons.append(f"FAIL_TO_PASS passes without a fix: {', '.join(passing[:5])}")
    if broken:
        reasons.append(f"PASS_TO_PASS fails without a change: {', '.join(broken[:5])}")
    return reasons


def _not_passed(task: Task, grade: Grade) -> list[str]:
    listed = (*task.fail_to_pass, *task.pass_to_pass)
    return [f"{name} {grade.tests[name]}" for name in listed if grade.tests.get(name, "PASSED") != "PASSED"]


def _differing(task: Task, grades: Sequence[Grade]) -> list[str]:
    listed = (*task.fail_to_pass, *task.pass_to_pass)
    return [name for name in listed if len({grade.tests.get(name) for grade in grades}) > 1]


def _failing_outside(task: Task, grades: Sequence[Grade]) -> list[str]:
    listed = {*task.fail_to_pass, *task.pass_to_pass}
    return sorted(
        {
            name
            for grade in grades
            for name, status in grade.tests.items()
            if status in {"FAILED", "ERROR"} and name not in listed
        }
    )
