"""Which paths of the work tree are the task's and not the model's: tests, what they lean on, and what runs them.

A patch that weakens a listed test passes it without a fix, so these paths are put back to the base before the tests
run. Where a path may as well be the code under test, the change stays and is only marked.
"""

from __future__ import annotations

import posixpath
import re
from enum import StrEnum
from typing import TYPE_CHECKING

from orchestrator.grading import commands
from orchestrator.grading.commands import PLACED_SCRIPT, Mode
from orchestrator.tasks.patches import patch_paths
from orchestrator.tasks.record import DatasetKind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from orchestrator.grading.placement import Change
    from orchestrator.tasks.record import Task

_TEST_FOLDERS = frozenset({"test", "tests", "testing", "r2e_tests", "__tests__", "spec"})
_TEST_FILE = re.compile(r"(?:test_.*|.*[._-](?:tests?|spec)|tests?|conftest)\.\w+", re.IGNORECASE)
_R2E_PATHS = ("run_tests.sh", "r2e_tests")
_SHELL = (".sh", ".bash")
_WORD = re.compile(r"[^\s'\"`;|&()<>=]+")


class Ruling(StrEnum):
    """What happens to a change, and the name of its flag."""

    RESTORED = "test_file_restored"
    CHANGED = "test_file_changed"
    """The change stays: the path looks like a test, but nothing says that it is not the code under test."""


class TaskFiles:
    """The paths of one task, worked out from its record and the paths of its base."""

    def __init__(self, task: Task, base_paths: Iterable[str]) -> None:
        """Read the lists, the targets and the script of `task`; paths are relative to the work tree."""
        self._base = frozenset(base_paths)
        test_paths = _patch_paths(task.test_patch)
        self._gold = _patch_paths(task.gold_patch) - test_paths
        self._knows_gold = task.gold_patch is not None
        self._import_roots = task.import_roots
        self._listed = _listed_files(task)
        self._owned = {*task.test_assets, *([PLACED_SCRIPT] if task.f2p_script is not None else [])}
        self._words = script_words(task)
        self._targets = {_relative(path, task.workdir) for path in task.targets}
        if task.dataset_kind is DatasetKind.R2E or task.expected_status is not None:
            self._targets.update(_R2E_PATHS)
        self._targets |= {word for word in self._words if _in_test_folder(f"{word}/x")}
        self._support = {
            folder for path in self._listed if _in_test_folder(path) and (folder := _folder(path))
        }
        # Without one listed file, what the script runs is unknown: every test of the base may count.
        self._any_test = not (self._listed & self._base) and not task.strict
        self._tests = self._listed | test_paths | {path for path in self._base if self._below_target(path)}

    def rule(self, change: Change) -> Ruling | None:
        """Say what happens to one change of the model's patch; None leaves it alone."""
        path = change.path
        if self._owns_above(change):
            return Ruling.RESTORED
        if path in self._gold:
            return Ruling.CHANGED if _looks_like_test(path) else None
        if path in self._listed or path in self._targets or self._runs(change):
            return Ruling.RESTORED
        if change.status == "A":
            return Ruling.RESTORED if self._collected(path) else None
        if self._below_target(path) or self._supports(path) or (self._any_test and _named_like_test(path)):
            return Ruling.RESTORED
        return Ruling.CHANGED if _looks_like_test(path) or self._near_target(path) else None

    def import_roots(self) -> set[str]:
        """Return the folders that may stand first on the import path (`""` is the work tree).

        Besides the record's these are the usual `src` and `lib`, and what pytest's default takes for each test file:
        the first folder upwards without an `__init__.py`.
        """
        roots = {"", *("" if root == "." else root for root in map(posixpath.normpath, self._import_roots))}
        for folder in {"src", "lib", *(_folder(path) for path in self._tests if path.endswith(".py"))}:
            root = folder
            while root and f"{root}/__init__.py" in self._base:
                root = _folder(root)
            roots.add(root)
        return roots

    def _owns_above(self, change: Change) -> bool:
        """Say whether the change puts a file or link where a path of the task, or a folder of one, belongs."""
        if change.path in self._owned or any(change.path.startswith(f"{path}/") for path in self._owned):
            return True
        if change.status == "D":
            return False
        paths = (*self._listed, *self._targets, *self._owned)
        return any(path.startswith(f"{change.path}/") for path in paths)

    def _runs(self, change: Change) -> bool:
        """Say whether the record's test command names this file and it is a test or a program."""
        if change.path not in self._words:
            return False
        return _looks_like_test(change.path) or change.path.endswith(_SHELL) or change.old_mode == "100755"

    def _collected(self, path: str) -> bool:
        return _named_like_test(path) and any(_is_below(path, target) for target in self._targets)

    def _below_target(self, path: str) -> bool:
        for target in self._targets:
            if _is_below(path, target) and (_named_like_test(path) or self._holds_tests_only(target)):
                return True
        return False

    def _near_target(self, path: str) -> bool:
        return path in self._words or any(_is_below(path, target) for target in self._targets - {"."})

    def _holds_tests_only(self, target: str) -> bool:
        if target == "." or any(_is_below(path, target) for path in self._gold):
            return _in_test_folder(f"{target}/x")
        return self._knows_gold or _in_test_folder(f"{target}/x")

    def _supports(self, path: str) -> bool:
        return any(_is_below(path, folder) for folder in self._support)


def script_words(task: Task) -> set[str]:
    """Return the words of the record's test command (the whole script where it has no markers) that may be paths."""
    text = task.eval_script or ""
    if task.eval_script is None or commands.choose_mode(task) not in {Mode.MARKED_SCRIPT, Mode.SCRIPT}:
        return set()
    if (found := commands.marker_lines(text)) is not None:
        text = "\n".join(text.split("\n")[found[0] + 1 : found[1]])
    words = (word.split("::", 1)[0] for word in _WORD.findall(text) if not word.startswith("-"))
    return {_relative(word, task.workdir) for word in words if word} - {".", ""}


def _listed_files(task: Task) -> set[str]:
    files = set()
    for node_id in (*task.fail_to_pass, *task.pass_to_pass, *(task.expected_status or ())):
        path, _, test = node_id.partition("::")
        # A doctest is called `file::dotted.name` and stands in the code under test.
        if (test or path.endswith(".py")) and "." not in test.split("[", 1)[0]:
            files.add(_relative(path, task.workdir))
    return files - {".", ""}


def _patch_paths(patch: bytes | None) -> set[str]:
    return {path.decode("utf-8", "surrogateescape") for path in patch_paths(patch)} if patch else set()


def _relative(path: str, workdir: str) -> str:
    inside = path.removeprefix(f"{workdir}/") if path != workdir else "."
    return posixpath.normpath(inside)


def _folder(path: str) -> str:
    return path.rpartition("/")[0]


def _is_below(path: str, folder: str) -> bool:
    return folder == "." or path.startswith(f"{folder}/")


def _named_like_test(path: str) -> bool:
    return _TEST_FILE.fullmatch(path.rpartition("/")[2]) is not None


def _in_test_folder(path: str) -> bool:
    return any(part in _TEST_FOLDERS for part in path.split("/")[:-1])


def _looks_like_test(path: str) -> bool:
    return _named_like_test(path) or _in_test_folder(path)
