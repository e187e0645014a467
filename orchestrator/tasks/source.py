"""Loading tasks from files and folders: what cannot be graded is reported with its place, the rest still runs."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator import errors
from orchestrator.tasks import fields, folder, swebench_rows
from orchestrator.tasks.dialects import IMAGE_TEMPLATES, normalise

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from orchestrator.tasks.record import DatasetKind, Task

LINES = frozenset({".jsonl", ".ndjson"})
"""Suffixes of files with one JSON record per line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """One record that will not run, and why."""

    where: str
    """`FILE:LINE`, `FILE[INDEX]` or the task folder."""
    instance_id: str | None
    reason: str
    hint: str = ""

    def __str__(self) -> str:
        """Return one line for people."""
        name = f" ({fields.brief(self.instance_id)})" if self.instance_id else ""
        return f"{self.where}{name}: {self.reason}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """What a path gave: tasks in the order of the file, repeated ids included, and what was refused."""

    tasks: list[Task]
    refused: list[Refusal]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Context:
    cache_dir: Path
    python: Path
    kind: DatasetKind | None
    images: Mapping[DatasetKind, str]
    places: list[str] = field(default_factory=list)
    found: list[Task | Refusal] = field(default_factory=list)

    def add(self, where: str, result: Task | Refusal) -> None:
        self.places.append(where)
        self.found.append(result)


def load_tasks(
    path: Path,
    *,
    cache_dir: Path,
    python: Path | None = None,
    kind: DatasetKind | None = None,
    images: Mapping[DatasetKind, str] = IMAGE_TEMPLATES,
) -> Loaded:
    """Load a JSONL file, a JSON list, one task folder, or a folder of any of these. Blocks: files, git, pip.

    `cache_dir` keeps what task folders derive from package releases; `python` (default: this interpreter) runs pip and
    the `swebench` package; `kind` holds for records that do not name their dialect. Raises `errors.TaskFileError` when
    the path as a whole cannot be read or holds nothing.
    """
    context = _Context(
        cache_dir=cache_dir.resolve(), python=python or Path(sys.executable), kind=kind, images=images
    )
    try:
        _load_path(path, context)
    except OSError as error:
        raise errors.TaskFileError(f"{path} cannot be read: {error.strerror or error}") from error
    _fill_eval_scripts(context)
    return Loaded(
        tasks=[item for item in context.found if not isinstance(item, Refusal)],
        refused=[item for item in context.found if isinstance(item, Refusal)],
    )


def _load_path(path: Path, context: _Context) -> None:
    if not path.exists():
        raise errors.TaskFileError(
            f"{path} does not exist",
            hint="name a .jsonl file, a .json file, a task folder or a folder of task folders",
        )
    if path.name == folder.TASK_FILE:
        path = path.parent
    if not path.is_dir():
        _load_file(path, context)
    elif folder.is_task_folder(path):
        _load_task_folder(path, context)
    else:
        _load_folder(path, context)


def _load_folder(path: Path, context: _Context) -> None:
    for entry in sorted(path.iterdir()):
        if entry.is_dir() and (folder.is_task_folder(entry) or (entry / "tests.json").exists()):
            _load_task_folder(entry, context)
        elif entry.suffix in LINES and entry.is_file():
            _load_file(entry, context)
    if not context.found:
        raise errors.TaskFileError(
            f"{path} holds no tasks",
            hint=f"a task folder has a {folder.TASK_FILE}; record files end in .jsonl",
        )


def _load_task_folder(path: Path, context: _Context) -> None:
    try:
        task = folder.read_task_folder(
            path, cache_dir=context.cache_dir, python=context.python, kind=context.kind, images=context.images
        )
    except errors.RecordRefused as refusal:
        context.add(str(path), _refusal(str(path), folder.instance_id_of(path), refusal))
    else:
        context.add(str(path), task)


def _load_file(path: Path, context: _Context) -> None:
    if not path.is_file():
        raise errors.TaskFileError(f"{path} is neither a file nor a folder")
    data = path.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise errors.TaskFileError(
            f"{path} is not UTF-8 text (line {line})", hint="unpack or convert it to JSON lines in UTF-8"
        ) from None
    if not text.strip():
        raise errors.TaskFileError(f"{path} is empty")
    if path.suffix == ".json":
        records = _items(path, text)
    elif path.suffix in LINES or not path.suffix:
        records = _lines(path, text)
    else:
        raise errors.TaskFileError(
            f"{path} is of no known kind",
            hint="record files end in .jsonl (one JSON record per line) or .json (a list)",
        )
    for where, content in records:
        context.add(where, _record(where, content, path.parent, context))


def _lines(path: Path, text: str) -> Iterator[tuple[str, str]]:
    # Only line feeds end a record: JSON text may hold the other characters that Python takes for line ends.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield f"{path}:{number}", line


def _items(path: Path, text: str) -> Iterator[tuple[str, object]]:
    try:
        content = fields.load_json(text)
    except errors.RecordRefused as refusal:
        raise errors.TaskFileError(
            f"{path}: {refusal}", hint="one record per line goes into a .jsonl file"
        ) from None
    if isinstance(content, dict):
        content = [content]
    if not isinstance(content, list):
        raise errors.TaskFileError(f"{path} holds a {fields.json_type(content)}, not a list of records")
    if not content:
        raise errors.TaskFileError(f"{path} is an empty list")
    for index, item in enumerate(content):
        yield f"{path}[{index}]", item


def _record(where: str, content: object, base_dir: Path, context: _Context) -> Task | Refusal:
    instance_id = None
    try:
        if isinstance(content, str):
            content = fields.load_json(content)
        if not isinstance(content, dict):
            raise errors.RecordRefused(f"the record is a {fields.json_type(content)}, not a JSON object")
        value = content.get("instance_id")
        instance_id = value if isinstance(value, str) else None
        return normalise(content, base_dir=base_dir, kind=context.kind, images=context.images)
    except errors.RecordRefused as refusal:
        return _refusal(where, instance_id, refusal)


def _refusal(where: str, instance_id: str | None, refusal: errors.RecordRefused) -> Refusal:
    return Refusal(where=where, instance_id=instance_id, reason=str(refusal), hint=refusal.hint)


def _fill_eval_scripts(context: _Context) -> None:
    """Give classic SWE-bench rows their eval scripts, all in one go: starting the package takes seconds."""
    waiting = [
        (index, item)
        for index, item in enumerate(context.found)
        if not isinstance(item, Refusal) and swebench_rows.needs_script(item)
    ]
    answers = swebench_rows.with_eval_scripts([task for _, task in waiting], python=context.python)
    for (index, task), answer in zip(waiting, answers, strict=True):
        if isinstance(answer, errors.RecordRefused):
            context.found[index] = _refusal(context.places[index], task.instance_id, answer)
        else:
            context.found[index] = answer
