"""Modules a patch adds that would take the name of one of the interpreter's or the test runner's.

Where the import path starts with the work tree, an `iniconfig.py` in its root runs inside the runner before the first
test does. No fix needs such a module, and one that the base has already is the repository's own.
"""

from __future__ import annotations

import posixpath
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from orchestrator.grading.placement import Change

_RUNNER = frozenset({
    "pytest", "_pytest", "pluggy", "py", "iniconfig", "packaging", "pygments", "exceptiongroup", "tomli", "colorama",
    "attr", "attrs", "six", "toml", "wcwidth", "more_itertools", "atomicwrites", "importlib_metadata", "zipp",
    "typing_extensions", "pathlib2", "xdist", "execnet", "hypothesis", "anyio", "coverage",
})  # fmt: skip
"""What pytest and its widespread plugins import, over the versions that public tasks use."""
_STANDARD = sys.stdlib_module_names | {
    "asynchat",
    "asyncore",
    "cgi",
    "distutils",
    "imp",
    "parser",
    "pipes",
    "smtpd",
}
"""This interpreter's list and what others have: the task's interpreter may be an older one."""
_MODULE_SUFFIXES = (".py", ".pyc", ".so")
_LINK = "120000"


def find_shadows(changes: Sequence[Change], roots: Iterable[str], base_paths: Iterable[str]) -> set[str]:
    """Return the added paths that make up a shadowing module at one of `roots` (`""` is the work tree).

    A folder without an `__init__` shadows nothing, whatever it is called, and stays.
    """
    added = {change.path: change.new_mode for change in changes if change.status == "A"}
    base, found = list(base_paths), set[str]()
    for root in roots:
        for path, mode in added.items():
            name = _module(path, root, link=mode == _LINK)
            if name is None or not _is_protected(name) or any(_module(old, root) == name for old in base):
                continue
            folder = posixpath.join(root, name)
            found.update(other for other in added if other == path or other.startswith(f"{folder}/"))
    return found


def _module(path: str, root: str, *, link: bool = False) -> str | None:
    """Return the top-level module that a file (or the `__init__` of a package) below `root` is."""
    inside = path.removeprefix(f"{root}/") if root else path
    if root and inside == path:
        return None
    first, _, rest = inside.partition("/")
    if link and not rest and "." not in first:
        return first
    name = rest if rest else first
    if "/" in name or not name.endswith(_MODULE_SUFFIXES):
        return None
    stem = name.split(".", 1)[0]
    if rest:
        return first if stem == "__init__" else None
    return stem


def _is_protected(name: str) -> bool:
    return name in _STANDARD or name in _RUNNER or name.startswith(("pytest_", "_pytest_"))
