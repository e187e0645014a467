"""Where a record's base tree lies on this machine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator import errors
from orchestrator.tasks.fields import brief
from orchestrator.tasks.record import RepoSource

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestrator.tasks.fields import Row


def repo_source(row: Row, *, base_dir: Path) -> RepoSource | None:
    """Return the local source of a row, from `repo_archive` (with `repo_archive_sha256`) or `repo_path`; else None.

    Relative paths start at `base_dir`. Raises `errors.RecordRefused` when the named thing is not there.
    """
    archive, folder = row.text("repo_archive"), row.text("repo_path")
    digest = row.text("repo_archive_sha256").lower() or None
    if digest is not None and not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise errors.RecordRefused(f"repo_archive_sha256 {brief(digest)} is no sha256 in hexadecimal digits")
    if archive:
        path = _locate(base_dir, "repo_archive", archive, is_right=Path.is_file, what="file")
        return RepoSource(kind="archive", path=path, sha256=digest)
    if folder:
        path = _locate(base_dir, "repo_path", folder, is_right=Path.is_dir, what="folder")
        return RepoSource(kind="git" if is_git_repository(path) else "tree", path=path)
    return None


def _locate(base_dir: Path, key: str, name: str, *, is_right: Callable[[Path], bool], what: str) -> Path:
    try:
        path = (base_dir / name).resolve()
        found = is_right(path)
    except (OSError, RuntimeError) as error:  # a loop of links, a name too long, no permission
        raise errors.RecordRefused(f"{key} {brief(name)} cannot be looked up: {error}") from None
    if not found:
        raise errors.RecordRefused(f"{key} {brief(name)} is no {what}", hint=f"looked for {path}")
    return path


def is_git_repository(path: Path) -> bool:
    """Say whether a folder is a work tree with its repository, or a bare repository."""
    is_bare = (path / "HEAD").is_file() and (path / "objects").is_dir() and (path / "refs").is_dir()
    return (path / ".git").exists() or is_bare
