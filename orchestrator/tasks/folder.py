"""Task folders: one task as files, so that patches keep their bytes and people can read the parts."""

from __future__ import annotations

import hashlib
import os
import stat
from typing import TYPE_CHECKING, Any

import yaml

from orchestrator import errors
from orchestrator.tasks import checks, fields, sdist
from orchestrator.tasks.dialects import IMAGE_TEMPLATES, normalise
from orchestrator.tasks.patches import check_patch
from orchestrator.tasks.record import DatasetKind, RepoSource, Task
from orchestrator.tasks.snapshot import commit_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

TASK_FILE = "task.yaml"
MAX_FILE_BYTES = 50_000_000

_FROM_FILES = (
    "FAIL_TO_PASS", "PASS_TO_PASS", "KNOWN_FAILING", "problem_statement", "eval_script", "test_patch", "patch",
    "gold_patch",
)  # fmt: skip


class _Loader(yaml.SafeLoader):
    """Plain YAML without aliases: a few lines of them can stand for gigabytes."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.events.AliasEvent):
            raise errors.RecordRefused(f"{TASK_FILE} uses a YAML alias, which task files must not")
        return super().compose_node(parent, index)


def is_task_folder(path: Path) -> bool:
    """Say whether a folder is one task."""
    return (path / TASK_FILE).is_file()


def read_task_folder(
    folder: Path,
    *,
    cache_dir: Path,
    python: Path,
    kind: DatasetKind | None = None,
    images: Mapping[DatasetKind, str] = IMAGE_TEMPLATES,
) -> Task:
    """Return the task in a folder; `python` runs pip when its code comes from two releases.

    Raises `errors.RecordRefused` with the reason; `instance_id_of` names the task all the same.
    """
    record = _task_yaml(folder)
    for key in _FROM_FILES:
        if not fields.is_empty(record.get(key)):
            raise errors.RecordRefused(f"{TASK_FILE} has {key}, which belongs in a file of its own")
    record |= _tests_json(folder)
    record["problem_statement"] = _read_text(folder, "problem_statement.md") or ""
    if eval_script := _read_text(folder, "eval.sh"):
        record["eval_script"] = eval_script
    if hints := _read_text(folder, "hints.md"):
        record["hints_text"] = hints
    attachments = _attachments(folder, record, cache_dir=cache_dir, python=python)
    if "test_patch" in attachments:
        check_patch("test.patch", attachments["test_patch"])
    if "gold_patch" in attachments:
        check_patch("gold.patch", attachments["gold_patch"])
    task = normalise(
        record, base_dir=folder, kind=kind or DatasetKind.LOCAL, images=images, attachments=attachments
    )
    _check_eval_script(task)
    return task


def instance_id_of(folder: Path) -> str | None:
    """Return the id that a task folder states, when that much of it can be read."""
    try:
        value = _task_yaml(folder).get("instance_id")
    except errors.RecordRefused:
        return None
    return value if isinstance(value, str) else None


def check_task_folder(folder: Path, *, cache_dir: Path, python: Path) -> list[str]:
    """Return every reason why a task folder is not fit for use; empty when it is (`validate --static`).

    Besides what loading refuses, the base commit is rebuilt from the folder's tree and compared.
    """
    try:
        task = read_task_folder(folder, cache_dir=cache_dir, python=python)
    except errors.RecordRefused as refusal:
        return [str(refusal)]
    reasons = []
    source = task.repo_source
    if task.gold_patch is None:
        reasons.append("there is no gold.patch, so nobody can show that the task can be solved")
    if source is None:
        reasons.append("there is neither repo.tar.gz nor repo/, and no source block in task.yaml")
    elif task.base_commit is not None and source.kind != "git":
        try:
            rebuilt = commit_of(source.path)
        except errors.RecordRefused as refusal:
            return [*reasons, str(refusal)]
        if rebuilt != task.base_commit:
            reasons.append(f"base_commit is {task.base_commit}, but {source.path.name} gives {rebuilt}")
    return reasons


def _task_yaml(folder: Path) -> dict[str, Any]:
    text = _read_text(folder, TASK_FILE)
    if not text:
        raise errors.RecordRefused(f"there is no {TASK_FILE}, or it is empty")
    try:
        # _Loader is SafeLoader with fewer abilities.
        record = yaml.load(text, Loader=_Loader)  # noqa: S506
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" in line {mark.line + 1}" if mark is not None else ""
        raise errors.RecordRefused(f"{TASK_FILE} is no valid YAML{line}") from None
    except (
        RecursionError,
        ValueError,
        OverflowError,
    ) as error:  # endless nesting, impossible dates and numbers
        raise errors.RecordRefused(f"{TASK_FILE} cannot be read: {fields.brief(str(error))}") from None
    if not isinstance(record, dict):
        raise errors.RecordRefused(f"{TASK_FILE} holds a {fields.json_type(record)}, not keys and values")
    return fields.plain(record)


def _tests_json(folder: Path) -> dict[str, Any]:
    text = _read_text(folder, "tests.json")
    if not text:
        return {}
    try:
        tests = fields.load_json(text)
    except errors.RecordRefused as refusal:
        raise errors.RecordRefused(f"tests.json: {refusal}") from None
    if not isinstance(tests, dict):
        raise errors.RecordRefused(f"tests.json holds a {fields.json_type(tests)}, not an object")
    known = {"FAIL_TO_PASS", "PASS_TO_PASS", "KNOWN_FAILING"}
    for key, value in tests.items():
        if key not in known:
            raise errors.RecordRefused(f"tests.json has the unknown key {fields.brief(key)}")
        if not isinstance(value, list):
            raise errors.RecordRefused(f"{key} in tests.json is a {fields.json_type(value)}, not a list")
    return tests


def _attachments(folder: Path, record: dict[str, Any], *, cache_dir: Path, python: Path) -> dict[str, Any]:
    """Read what stays bytes, and say where the base tree is."""
    found: dict[str, Any] = {}
    for name, field in (("test.patch", "test_patch"), ("gold.patch", "gold_patch")):
        if data := _read(folder, name):
            found[field] = data
    assets = _assets(folder / "test_assets")
    if assets:
        found["test_assets"] = assets
    source = _repo_source(folder, record)
    if source is not None:
        found["repo_source"] = source
    elif not fields.is_empty(record.get("source")):
        found |= _derived(record, cache_dir=cache_dir, python=python)
    return found


def _repo_source(folder: Path, record: dict[str, Any]) -> RepoSource | None:
    digest = record.pop("repo_archive_sha256", None) or record.pop("sha256", None)
    archive = folder / "repo.tar.gz"
    if archive.is_file():
        actual = hashlib.sha256(archive.read_bytes()).hexdigest()
        if digest is not None and digest != actual:
            raise errors.RecordRefused(
                f"repo.tar.gz has sha256 {actual}, task.yaml says {fields.brief(digest)}"
            )
        return RepoSource(kind="archive", path=archive.resolve(), sha256=actual)
    if (folder / "repo").is_dir():
        return RepoSource(kind="tree", path=(folder / "repo").resolve())
    return None


def _derived(record: dict[str, Any], *, cache_dir: Path, python: Path) -> dict[str, Any]:
    source = sdist.parse_source(record["source"])
    instance_id = record.get("instance_id")
    name = instance_id if isinstance(instance_id, str) else ""
    derived = sdist.derive(source, instance_id=name, cache_dir=cache_dir, python=python)
    stated = record.setdefault("base_commit", derived.base_commit)
    if stated != derived.base_commit:
        raise errors.RecordRefused(
            f"base_commit is {fields.brief(stated)}, but the releases give {derived.base_commit}"
        )
    return {
        "repo_source": RepoSource(kind="archive", path=derived.archive, sha256=derived.archive_sha256),
        "gold_patch": derived.gold_patch,
        "test_patch": derived.test_patch,
    }


def _check_eval_script(task: Task) -> None:
    if task.eval_script is None or task.strict or checks.is_exit_code_only(task):
        return
    if not checks.has_both_markers(task.eval_script):
        raise errors.RecordRefused(
            "eval.sh lacks a marker, so its test output cannot be told from the rest",
            hint=f"frame the test command with : '{checks.START_MARKER}' and : '{checks.END_MARKER}'",
        )


def _assets(folder: Path) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for parent, folders, files in os.walk(folder):
        folders.sort()
        for name in sorted([*files, *folders]):
            relative = os.path.relpath(os.path.join(parent, name), folder)  # noqa: PTH118 - os.walk gives texts
            if (folder / relative).is_dir() and not (folder / relative).is_symlink():
                continue
            data = _read(folder, relative)
            if data is not None:
                found[fields.relative_path("test_assets", relative)] = data
    return found


def _read_text(folder: Path, name: str) -> str | None:
    data = _read(folder, name)
    if data is None:
        return None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise errors.RecordRefused(f"{name} is not UTF-8 (byte {error.start})") from None


def _read(folder: Path, name: str) -> bytes | None:
    """Return a file's bytes, None without one. A link could name any file of this machine, so links are refused."""
    try:
        descriptor = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise errors.RecordRefused(
            f"{name} cannot be read: {error.strerror}", hint="links are not followed in a task folder"
        ) from None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise errors.RecordRefused(f"{name} is no regular file")
        if status.st_size > MAX_FILE_BYTES:
            raise errors.RecordRefused(f"{name} has {status.st_size} bytes, more than {MAX_FILE_BYTES}")
        return file.read(MAX_FILE_BYTES + 1)
