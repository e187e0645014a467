"""Make the tree that is tested: base, then the model's patch, then everything that is not the model's to decide.

All of it is worked out in git trees of ours and only then written to the work tree, so that a hostile patch meets no
step that follows a link, trusts a configuration or reads a file the patch brought along.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from orchestrator import errors
from orchestrator.grading import infrastructure, shadowing
from orchestrator.grading.commands import PLACED_SCRIPT
from orchestrator.grading.task_files import Ruling, TaskFiles
from orchestrator.sandbox import repository

if TYPE_CHECKING:
    from orchestrator.sandbox.base import Sandbox
    from orchestrator.tasks.record import Task

TIMEOUT_S = 300.0
_READ_BLOBS = (
    'g="$P/grade"; n=0; for id in "$@"; do snap cat-file blob "$id" >"$g/blob-$n"; n=$((n + 1)); done'
)


class Applied(StrEnum):
    """How placing the patches went."""

    OK = "ok"
    MODEL_REFUSED = "model_refused"
    TEST_REFUSED = "test_refused"


_EXITS = {0: Applied.OK, 40: Applied.MODEL_REFUSED, 41: Applied.TEST_REFUSED}


class Change(NamedTuple):
    """One path of `git diff-tree --raw`."""

    path: str
    old_mode: str
    new_mode: str
    old_id: str
    new_id: str
    status: str


@dataclass(slots=True)
class Placement:
    """What was placed, or git's words why not."""

    applied: Applied
    message: str = ""
    flags: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Plan:
    """Index lines by path (`0` mode removes) and files by path, to go over the model's tree."""

    entries: dict[str, str] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)

    def set(self, path: str, mode: str, blob_id: str) -> None:
        self.blobs.pop(path, None)
        self.entries[path] = f"{mode} {blob_id}\t{path}"

    def remove(self, path: str, like: str) -> None:
        self.set(path, "0", "0" * len(like))

    def mark(self, kind: str, path: str) -> None:
        if (flag := f"{kind}:{_show(path)}") not in self.flags:
            self.flags.append(flag)

    def restore(self, change: Change) -> None:
        if change.status == "A":
            self.remove(change.path, change.new_id)
        else:
            self.set(change.path, change.old_mode, change.old_id)


async def place(task: Task, patch: bytes, sandbox: Sandbox) -> Placement:
    """Bring a fresh sandbox's work tree to the state that is tested; `repository.keep_pristine` must have run.

    Raises `errors.GraderError` when something of ours fails, `errors.SandboxLost` when the sandbox is gone.
    """
    grade_dir = f"{sandbox.private_dir}/grade"
    flags = [] if patch.endswith(b"\n") else ["newline_added"]
    await sandbox.write(f"{grade_dir}/model.patch", patch if not flags else patch + b"\n")
    names = ["model"]
    if task.test_patch:
        newline = b"" if task.test_patch.endswith(b"\n") else b"\n"
        await sandbox.write(f"{grade_dir}/test.patch", task.test_patch + newline)
        names.append("test")
    result = await repository.run_script(
        sandbox,
        repository.script("orchestrator.grading", "apply.sh"),
        arguments=tuple(names),
        timeout_s=TIMEOUT_S,
    )
    if result.exit_code not in _EXITS:
        raise errors.GraderError(
            f"sandbox {sandbox.key}: a patch could not be applied for a reason that is not the patch's: "
            f"{repository.describe(result)}"
        )
    if (applied := _EXITS[result.exit_code]) is not Applied.OK:
        text = result.output[-4000:].decode("utf-8", "backslashreplace")
        return Placement(applied=applied, message=text, flags=flags)
    model = parse_raw(await sandbox.read(f"{grade_dir}/model.raw"))
    test = parse_raw(await sandbox.read(f"{grade_dir}/test.raw")) if task.test_patch else []
    data = await sandbox.read(f"{sandbox.private_dir}/base-paths")
    base = [path for path in data.decode("utf-8", "surrogateescape").split("\0") if path]
    plan = _Plan(flags=flags)
    await _restore_infrastructure(plan, model, sandbox)
    await asyncio.to_thread(_restore_task_files, plan, task, model, base)
    _overlay_tests(plan, model, test, keep_base=applies_own_tests(task))
    _drop_other_conftests(plan, task, base, like=model[0].old_id)
    _add_files(plan, task)
    await _write(plan, sandbox)
    return Placement(applied=Applied.OK, flags=plan.flags)


def parse_raw(data: bytes) -> list[Change]:
    """Parse `git diff-tree -z --raw` (format: git-diff(1), RAW OUTPUT FORMAT); any byte in a path survives."""
    fields = data.decode("utf-8", "surrogateescape").split("\0")
    changes = []
    for meta, path in zip(fields[0:-1:2], fields[1::2], strict=True):
        old_mode, new_mode, old_id, new_id, status = meta.removeprefix(":").split(" ")
        changes.append(Change(path, old_mode, new_mode, old_id, new_id, status[:1]))
    return changes


def applies_own_tests(task: Task) -> bool:
    """Say whether the record's script applies the test patch itself, so that doing it twice would fail."""
    if task.strict or not task.eval_script or not task.test_patch:
        return False
    headers = {line.strip() for line in task.test_patch.split(b"\n") if line.startswith(b"diff --git ")}
    script = {line.strip() for line in task.eval_script.encode().split(b"\n")}
    return bool(headers & script)


async def _restore_infrastructure(plan: _Plan, model: list[Change], sandbox: Sandbox) -> None:
    sectioned = []
    for change in model:
        name = change.path.rsplit("/", 1)[-1]
        if infrastructure.steers_tests(change.path):
            plan.restore(change)
            plan.mark("test_infra", change.path)
        elif name in infrastructure.SECTIONED and change.status in "AM":
            sectioned.append(change)
    ids = [blob for c in sectioned for blob in (c.old_id, c.new_id) if blob.strip("0")]
    blobs = dict(zip(ids, await _read_blobs(ids, sandbox), strict=True))
    for change in sectioned:
        old, new = blobs.get(change.old_id, b""), blobs[change.new_id]
        restored = infrastructure.restore_sections(change.path.rsplit("/", 1)[-1], old, new)
        if restored != new:
            plan.blobs[change.path] = restored
            plan.mark("test_infra", change.path)


async def _read_blobs(ids: list[str], sandbox: Sandbox) -> list[bytes]:
    if not ids:
        return []
    await _run(sandbox, _READ_BLOBS, *ids)
    return [await sandbox.read(f"{sandbox.private_dir}/grade/blob-{n}") for n in range(len(ids))]


def _restore_task_files(plan: _Plan, task: Task, model: list[Change], base: list[str]) -> None:
    """Put the task's own paths back to the base and take out modules that shadow the interpreter's or the runner's."""
    files = TaskFiles(task, base)
    shadows = shadowing.find_shadows(model, files.import_roots(), base)
    for change in model:
        if change.path in plan.entries:
            continue
        if change.path in shadows:
            plan.restore(change)
            plan.mark("shadow", change.path)
        elif (ruling := files.rule(change)) is not None:
            if ruling is Ruling.RESTORED:
                plan.restore(change)
            plan.mark(ruling, change.path)


def _overlay_tests(plan: _Plan, model: list[Change], test: list[Change], *, keep_base: bool) -> None:
    """Give every path of the test patch the content it has in base plus test patch (or in the base alone)."""
    touched = {change.path for change in test}
    for change in model:
        below = any(change.path.startswith(f"{path}/") for path in touched)
        above = any(path.startswith(f"{change.path}/") for path in touched)
        if change.path in touched or below or (above and change.status != "D"):
            plan.restore(change)
            plan.mark(Ruling.RESTORED, change.path)
    for change in test:
        if keep_base:
            plan.restore(change)
        elif change.status == "D":
            plan.remove(change.path, change.old_id)
        else:
            plan.set(change.path, change.new_mode, change.new_id)


def _drop_other_conftests(plan: _Plan, task: Task, base: list[str], *, like: str) -> None:
    """With `allow_conftest`, the named ones are the only ones: `--confcutdir` alone would run others below it."""
    if not (task.strict and task.allow_conftest):
        return
    for path in base:
        if path.rsplit("/", 1)[-1] == "conftest.py" and path not in task.allow_conftest:
            plan.remove(path, like)


def _add_files(plan: _Plan, task: Task) -> None:
    for path, data in task.test_assets.items():
        plan.blobs[path] = data
    if task.f2p_script is not None and not task.strict:
        plan.blobs[PLACED_SCRIPT] = task.f2p_script.encode()


async def _write(plan: _Plan, sandbox: Sandbox) -> None:
    grade_dir = f"{sandbox.private_dir}/grade"
    # Removals first: an entry that is put in the place of a folder must not be undone by them.
    ordered = sorted(plan.entries.items(), key=lambda item: (not item[1].startswith("0 "), item[0]))
    lines = "".join(f"{line}\0" for path, line in ordered if path not in plan.blobs)
    await sandbox.write(f"{grade_dir}/entries", lines.encode("utf-8", "surrogateescape"))
    names = "".join(f"{path}\0" for path in plan.blobs)
    await sandbox.write(f"{grade_dir}/blobs.list", names.encode("utf-8", "surrogateescape"))
    for number, data in enumerate(plan.blobs.values()):
        await sandbox.write(f"{grade_dir}/blobs/{number}", data)
    await _run(sandbox, repository.script("orchestrator.grading", "place.sh"))


async def _run(sandbox: Sandbox, text: str, *arguments: str) -> bytes:
    result = await repository.run_script(sandbox, text, arguments=arguments, timeout_s=TIMEOUT_S)
    if result.exit_code != 0:
        raise errors.GraderError(
            f"sandbox {sandbox.key}: the tree to test could not be made: {repository.describe(result)}"
        )
    return result.output


def _show(path: str) -> str:
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
