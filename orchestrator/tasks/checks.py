"""What makes a task worth running: a task that could not be graded is refused before anything is started."""

from __future__ import annotations

import re

from orchestrator import errors
from orchestrator.tasks.fields import brief
from orchestrator.tasks.log_parsers import KNOWN_PARSERS
from orchestrator.tasks.patches import check_patch
from orchestrator.tasks.record import DatasetKind, Task

START_MARKER = ">>>>> Start Test Output"
END_MARKER = ">>>>> End Test Output"

MAX_ID = 200
"""Characters of an instance id."""


def has_both_markers(script: str) -> bool:
    """Say whether an eval script frames its test output in the way SWE-bench's do."""
    return START_MARKER in script and END_MARKER in script


def is_exit_code_only(task: Task) -> bool:
    """Say whether the verdict is an exit code alone: an `areal` or `slime` row without any test list."""
    if task.dataset_kind not in {DatasetKind.AREAL, DatasetKind.SLIME} or task.strict:
        return False
    if task.fail_to_pass or task.pass_to_pass:
        return False
    if task.eval_script is not None:
        return not has_both_markers(task.eval_script)
    return task.f2p_script is not None and task.f2p_mode == "execute"


def check_task(task: Task) -> None:
    """Raise `errors.RecordRefused` with the reason when this task cannot be graded."""
    _check_id(task.instance_id)
    if not task.problem_statement.strip():
        raise errors.RecordRefused("problem_statement is empty")
    if task.base_commit is not None and not re.fullmatch(r"[0-9a-fA-F]{7,64}", task.base_commit):
        raise errors.RecordRefused(f"base_commit {brief(task.base_commit)} is no commit id")
    if task.log_parser is not None and task.log_parser not in KNOWN_PARSERS:
        raise errors.RecordRefused(
            f"log_parser {brief(task.log_parser)} is not one that the grader implements",
            hint="known names: " + ", ".join(sorted(KNOWN_PARSERS)) + "; source text is never executed",
        )
    if task.test_patch is not None:
        check_patch("test_patch", task.test_patch)
    _check_lists(task)


def _check_id(instance_id: str) -> None:
    if not instance_id.strip() or len(instance_id) > MAX_ID or not instance_id.isprintable():
        raise errors.RecordRefused(
            f"instance_id {brief(instance_id)} is empty, longer than {MAX_ID} characters or not printable"
        )


def _check_lists(task: Task) -> None:
    seen: set[str] = set()
    for test_id in task.fail_to_pass:
        if test_id in seen:
            raise errors.RecordRefused(f"FAIL_TO_PASS names {brief(test_id)} twice")
        seen.add(test_id)
    both = seen & set(task.pass_to_pass)
    if both:
        raise errors.RecordRefused(f"{brief(min(both))} is in FAIL_TO_PASS and in PASS_TO_PASS")
    if not task.fail_to_pass and not is_exit_code_only(task):
        raise errors.RecordRefused(
            f"FAIL_TO_PASS is empty, and the verdict of a {task.dataset_kind} task depends on it",
            hint="an empty list would count as solved by any patch; only areal and slime rows with a script whose "
            "exit code decides may do without",
        )
