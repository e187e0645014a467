"""Eval scripts for classic SWE-bench rows, which carry none: the `swebench` package knows them by repository and version.

The package is only ever imported in a process of its own. It has to be older than 5.0: from then on it, too, expects
the script in the row.
"""

from __future__ import annotations

import json
import re
import subprocess
from typing import TYPE_CHECKING

from orchestrator import errors
from orchestrator.tasks import checks
from orchestrator.tasks.record import DatasetKind, Task

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

TIMEOUT_S = 300.0
INSTALL = 'pip install "areal-sweagent[swebench]"'

# Only the eval script is made: a whole test spec would ask the network for each repository's requirements.
_CHILD = """\
import json, sys

sys.path = [entry for entry in sys.path if entry]
rows = json.load(sys.stdin)
sys.stdout, answer = sys.stderr, sys.stdout
try:
    import swebench
except ImportError as error:
    json.dump({"missing": str(error)}, answer)
    sys.exit()
try:
    from swebench.harness.constants import MAP_REPO_VERSION_TO_SPECS
    from swebench.harness.log_parsers import MAP_REPO_TO_PARSER
    from swebench.harness.test_spec.create_scripts import make_eval_script_list
except ImportError as error:
    json.dump({"unfit": str(error), "version": getattr(swebench, "__version__", "?")}, answer)
    sys.exit()
answers = []
for row in rows:
    try:
        specs = MAP_REPO_VERSION_TO_SPECS[row["repo"]][row["version"]]
        lines = make_eval_script_list(row, specs, "testbed", "/testbed", row["base_commit"], row["test_patch"])
        parser = MAP_REPO_TO_PARSER[row["repo"]].__name__
        answers.append({"script": "\\n".join(["#!/bin/bash", "set -uxo pipefail", *lines]) + "\\n", "parser": parser})
    except Exception as error:
        answers.append({"error": "%s: %s" % (type(error).__name__, error)})
json.dump({"answers": answers}, answer)
"""

_BARE_CHECKOUT = re.compile(r"git checkout [0-9a-fA-F]{7,64}\s*")


def needs_script(task: Task) -> bool:
    """Say whether this is a classic row whose eval script has to be looked up."""
    if task.dataset_kind not in {DatasetKind.SWEBENCH, DatasetKind.SWEBENCH_V5} or task.strict:
        return False
    if task.eval_script is not None or task.f2p_script is not None or task.test_patch is None:
        return False
    return bool(task.repo and task.base_commit and task.extra.get("version"))


def with_eval_scripts(tasks: Sequence[Task], *, python: Path) -> list[Task | errors.RecordRefused]:
    """Return each task with its eval script and log parser, or why it has none. Blocks; one process for all.

    `python` is an interpreter that has the `swebench` package.
    """
    queries = [_query(task) for task in tasks]
    if not queries:
        return []
    try:
        answers = _ask(queries, python)
    except errors.RecordRefused as refusal:
        return [refusal] * len(tasks)
    return [_completed(task, answer) for task, answer in zip(tasks, answers, strict=True)]


def _query(task: Task) -> dict[str, object]:
    return {
        "repo": task.repo,
        "version": str(task.extra.get("version")),
        "base_commit": task.base_commit,
        "test_patch": (task.test_patch or b"").decode(errors="replace"),
        "instance_id": task.instance_id,
    }


def _ask(queries: list[dict[str, object]], python: Path) -> list[dict[str, str]]:
    try:
        done = subprocess.run(
            [str(python), "-c", _CHILD], input=json.dumps(queries).encode(), capture_output=True,
            timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise errors.RecordRefused(
            f"the swebench package gave no eval script within {TIMEOUT_S:.0f} s"
        ) from None
    except OSError as error:
        raise errors.RecordRefused(f"{python} cannot be started: {error.strerror}") from None
    try:
        reply = json.loads(done.stdout)
    except ValueError:
        tail = done.stderr.decode(errors="replace").strip()[-300:]
        raise errors.RecordRefused(f"the swebench package failed (code {done.returncode}): {tail}") from None
    if "missing" in reply:
        raise errors.RecordRefused(
            f"the row has no eval script, and the package that knows it is not installed; {INSTALL}",
            hint=INSTALL,
        )
    if "unfit" in reply:
        raise errors.RecordRefused(
            f"the row has no eval script, and swebench {reply['version']} no longer knows any; {INSTALL}",
            hint=f"{INSTALL} (a release before 5.0), or use rows that carry eval_script",
        )
    answers: list[dict[str, str]] = reply["answers"]
    return answers


def _completed(task: Task, answer: dict[str, str]) -> Task | errors.RecordRefused:
    if "error" in answer:
        return errors.RecordRefused(
            f"the swebench package has no eval script for {task.repo} {task.extra.get('version')}: {answer['error']}"
        )
    # A checkout without paths would throw away the patch under test (SWE-bench #475, #508, #518).
    lines = [line for line in answer["script"].split("\n") if not _BARE_CHECKOUT.fullmatch(line)]
    filled = task.model_copy(
        update={"eval_script": "\n".join(lines), "log_parser": task.log_parser or answer["parser"]}
    )
    try:
        checks.check_task(filled)
    except errors.RecordRefused as refusal:
        return refusal
    return filled
