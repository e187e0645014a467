"""What steers a test run from inside a repository, so that a patch may not bring it along.

A conftest, a runner's configuration or a file that Python loads at start-up can turn every verdict around without
fixing anything (SWE-bench issue 631); all of them are put back to the base before the tests run.
"""

from __future__ import annotations

import configparser
import re
import tomllib
from pathlib import PurePosixPath

_FILES = frozenset({"conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini"})
_STARTUP = frozenset({"sitecustomize", "usercustomize"})
_ENVIRONMENT = ".venv"
_SUFFIXES = (".pth", ".pyc")
_FOLDER_SUFFIXES = (".egg-info", ".dist-info")

SECTIONED = frozenset({"setup.cfg", "pyproject.toml"})
"""Files of which only the runner's sections are put back."""

_SECTION = re.compile(r"^\s*\[+\s*[\"']?([A-Za-z0-9_.:\"' -]+?)[\"']?\s*\]+\s*(?:[#;].*)?$")


def steers_tests(path: str) -> bool:
    """Say whether a changed path (relative to the repository) is test infrastructure: configuration, conftest or start-up."""
    parts = PurePosixPath(path).parts
    if not parts:
        return False
    if parts[-1] in _FILES or parts[-1].endswith(_SUFFIXES):
        return True
    if any(part.endswith(_FOLDER_SUFFIXES) or part.split(".")[0] in _STARTUP for part in parts):
        return True
    return parts[0] == _ENVIRONMENT  # the interpreter itself, where an image keeps it in the work tree


def restore_sections(name: str, base: bytes, changed: bytes) -> bytes:
    """Return `changed` (a `setup.cfg` or `pyproject.toml`) with the runner's sections as `base` has them.

    Where the two cannot be told apart with certainty, the whole base file is returned.
    """
    read = _toml_sections if name == "pyproject.toml" else _ini_sections
    try:
        old, new = read(base), read(changed)
    except (ValueError, configparser.Error):
        return base
    if old == new:
        return changed
    merged = _cut(changed.decode(), keep=False) + _cut(base.decode(), keep=True)
    try:
        restored = read(merged.encode())
    except (ValueError, configparser.Error):
        return base
    return merged.encode() if restored == old else base


def _is_runner_section(name: str) -> bool:
    words = re.split(r"[.:]", name.replace('"', "").replace("'", "").replace(" ", ""))
    return words[0] == "pytest" or (words[0] == "tool" and words[1:2] == ["pytest"])


def _cut(text: str, *, keep: bool) -> str:
    """Return the lines inside (`keep`) or outside the runner's sections."""
    inside = False
    lines: list[str] = []
    for line in text.splitlines(keepends=True):
        if header := _SECTION.match(line):
            inside = _is_runner_section(header.group(1))
        if inside is keep:
            lines.append(line)
    joined = "".join(lines)
    return joined + "\n" if joined and not joined.endswith("\n") else joined


def _toml_sections(data: bytes) -> object:
    tool = tomllib.loads(data.decode()).get("tool", {})
    return tool.get("pytest") if isinstance(tool, dict) else None


def _ini_sections(data: bytes) -> object:
    parser = configparser.RawConfigParser(strict=False)
    parser.read_string(data.decode())
    return {name: dict(parser.items(name)) for name in parser.sections() if _is_runner_section(name)}
