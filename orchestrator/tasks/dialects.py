"""Every public record dialect to the one `Task`, by fixed rules: the first non-empty key wins, nothing is evaluated."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pydantic

from orchestrator import errors
from orchestrator.tasks import checks, fields, locations
from orchestrator.tasks.patches import reverse_patch
from orchestrator.tasks.record import DatasetKind, Task

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

IMAGE_TEMPLATES: Mapping[DatasetKind, str] = {
    DatasetKind.SWEBENCH: "swebench/sweb.eval.x86_64.{id_1776}:latest",
    DatasetKind.SWEBENCH_V5: "swebench/sweb.eval.x86_64.{id_1776}:latest",
    DatasetKind.SWEGYM: "xingyaoww/sweb.eval.x86_64.{id_s}:latest",
    DatasetKind.SWELIVE: "starryzhang/sweb.eval.x86_64.{id_1776}:latest",
    DatasetKind.SWEPRO: "jefzda/sweap-images:{tag}",
}
"""Image of a row that names none. `{id_1776}` and `{id_s}`: the lower-case instance id with `__` replaced by `_1776_`
and `_s_`; `{tag}`: the row's image tag. A mirror or namespace of one's own is passed to the loader instead."""

WORKDIRS: Mapping[DatasetKind, str] = {
    DatasetKind.SWEPRO: "/app",
    DatasetKind.SCALESWE: "/workspace/{name}",
}
"""Where the repository lies when the row does not say; `/testbed` for every kind that is not listed."""

MAX_TAG = 128
"""Characters of an image tag; longer ones were cut when the images were published."""

_ISSUE = re.compile(r"\[ISSUE\](.*?)\[/ISSUE\]", re.DOTALL)
_TIMING = re.compile(r"\s+\[\d+(?:\.\d+)?\s*m?s\]$")
_RUNS_PYTEST = re.compile(r"sys\s*\.\s*exit\s*\(\s*pytest\s*\.\s*main\s*\(")


def normalise(
    record: Mapping[str, Any],
    *,
    base_dir: Path,
    kind: DatasetKind | None = None,
    images: Mapping[DatasetKind, str] = IMAGE_TEMPLATES,
    attachments: Mapping[str, Any] | None = None,
) -> Task:
    """Return the task that a record of any dialect describes.

    `base_dir` is where the record's file lies: relative `repo_archive` and `repo_path` start there. `kind` holds for
    records that do not name theirs in `dataset_kind`; without it the shape decides. `attachments` are `Task` fields
    that a task folder read from files. Raises `errors.RecordRefused` for what cannot be graded.
    """
    row = fields.Row(_flatten(fields.plain(record)))
    kind = _kind(row, kind)
    values = _identity(row, kind, images)
    values.update(_content(row))
    values.update(_tests(row, kind))
    values.update(_gold(row, kind))
    values["repo_source"] = locations.repo_source(row, base_dir=base_dir)
    values["extra"] = row.rest() | values.pop("notes")
    values.update(attachments or {})
    try:
        task = Task(**values)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise errors.RecordRefused(f"{where}: {first['msg']}") from None
    checks.check_task(task)
    return task


def _flatten(record: dict[str, Any]) -> dict[str, Any]:
    """Lift slime's nested fields to the top, where the other dialects have them; what the top says stays."""
    metadata = record.get("metadata")
    if isinstance(metadata, str) and metadata.lstrip().startswith("{"):
        metadata = fields.plain({"metadata": fields.load_json(metadata)})["metadata"]
    if not isinstance(metadata, dict) or not {"remote_env_info", "eval_cmd"} & metadata.keys():
        return record
    merged = {key: value for key, value in record.items() if key != "metadata"}
    merged.setdefault("dataset_kind", DatasetKind.SLIME.value)
    inner = metadata.get("remote_env_info")
    levels = [{k: v for k, v in metadata.items() if k != "remote_env_info" or not isinstance(inner, dict)}]
    if isinstance(inner, dict):
        levels.append(inner)
    for level in levels:
        for key, value in level.items():
            if fields.is_empty(merged.get(key)):
                merged[key] = value
    return merged


def _kind(row: fields.Row, configured: DatasetKind | None) -> DatasetKind:
    named = row.text("dataset_kind")
    if named:
        try:
            return DatasetKind(named)
        except ValueError:
            known = ", ".join(DatasetKind)
            raise errors.RecordRefused(
                f"dataset_kind {fields.brief(named)} is unknown", hint=f"one of: {known}"
            ) from None
    return configured or _kind_by_shape(row)


def _kind_by_shape(row: fields.Row) -> DatasetKind:
    scripts = [
        text for key in ("eval_script", "script") if isinstance(text := row.peek(key), str) and text.strip()
    ]
    shapes = [
        (row.peek("expected_output_json") is not None, DatasetKind.R2E),
        ("parent_commit" in row, DatasetKind.SCALESWE),
        ("before_repo_set_cmd" in row, DatasetKind.SWEPRO),
        ("remote_env_info" in row or "eval_cmd" in row, DatasetKind.SLIME),
        ("image_name" in row and "test_patch" not in row, DatasetKind.SWESMITH),
        (bool(scripts) and checks.has_both_markers(scripts[0]), DatasetKind.SWEBENCH_V5),
        (bool(scripts), DatasetKind.AREAL),
        ("install_config" in row, DatasetKind.REBENCH),
        ("test_cmds" in row, DatasetKind.SWELIVE),
        ("repo_archive" in row or "repo_path" in row, DatasetKind.LOCAL),
    ]
    return next((kind for matches, kind in shapes if matches), DatasetKind.SWEBENCH)


def _identity(row: fields.Row, kind: DatasetKind, images: Mapping[DatasetKind, str]) -> dict[str, Any]:
    repo = _repo(row, kind)
    instance_id = row.text("instance_id")
    if not instance_id and kind is DatasetKind.R2E and "commit_hash" in row and repo:
        instance_id = f"{repo}__{str(row.peek('commit_hash'))[:12]}"
    if not instance_id:
        raise errors.RecordRefused("there is no instance_id")
    workdir = row.text("workdir", "repo_dir") or _default_workdir(row, kind, repo)
    return {
        "instance_id": instance_id,
        "dataset_kind": kind,
        "repo": repo,
        # R2E-Gym's commit_hash names the fixed commit, so that kind has no base commit at all.
        "base_commit": None if kind is DatasetKind.R2E else row.text("base_commit", "parent_commit") or None,
        "workdir": fields.absolute_path("workdir", workdir),
        "image": _image(row, kind, images, instance_id),
    }


def _repo(row: fields.Row, kind: DatasetKind) -> str:
    repo = row.text("repo", "repo_name") if kind is DatasetKind.R2E else row.text("repo")
    if kind is DatasetKind.SCALESWE and "/" not in repo and "user" in row:
        return f"{row.text('user')}/{repo}"
    return repo


def _default_workdir(row: fields.Row, kind: DatasetKind, repo: str) -> str:
    name = repo.rpartition("/")[2]
    if kind is DatasetKind.REBENCH and not ("version" in row or "environment_setup_commit" in row):
        return f"/{name}"  # the second edition of the data set, which dropped the classic columns
    template = WORKDIRS.get(kind, "/testbed")
    if "{name}" in template and not name:
        raise errors.RecordRefused("there is neither a workdir nor a repo to name it after")
    return template.replace("{name}", name)


def _image(
    row: fields.Row, kind: DatasetKind, images: Mapping[DatasetKind, str], instance_id: str
) -> str | None:
    image = row.text("image", "image_name", "image_url", "docker_image")
    if image:
        return image
    tag = row.text("dockerhub_tag")[:MAX_TAG]
    template = images.get(kind)
    if template is None or ("{tag}" in template and not tag):
        return tag or None
    lower = instance_id.lower()
    known = {"{id_1776}": lower.replace("__", "_1776_"), "{id_s}": lower.replace("__", "_s_"), "{tag}": tag}
    for placeholder, value in known.items():
        template = template.replace(placeholder, value)
    return template


def _content(row: fields.Row) -> dict[str, Any]:
    pre_commands = row.text("pre_commands")
    return {
        "problem_statement": _statement(row),
        "pre_commands": pre_commands.removesuffix("\\n"),
        "hide_git": row.flag("hide_git", default=True),
        "strict": row.flag("strict", default=False),
        "timeout_s": row.seconds("timeout_s", default=1800.0),
        "import_roots": fields.relative_paths("import_roots", row.ids("import_roots")) or (".",),
        "allow_conftest": fields.relative_paths("allow_conftest", row.ids("allow_conftest")),
        "targets": fields.relative_paths("targets", row.ids("targets", "selected_test_files_to_run")),
    }


def _statement(row: fields.Row) -> str:
    _, value = row.take("problem_statement")
    if isinstance(value, list):
        issues = fields.parse_ids("problem_statement", value)
        numbered = [f"Issue {n}:\n\n{issue.strip()}" for n, issue in enumerate(issues, 1)]
        return issues[0] if len(issues) == 1 else "\n\n".join(numbered)
    if value is None:
        raise errors.RecordRefused("there is no problem_statement")
    if not isinstance(value, str):
        raise errors.RecordRefused(f"problem_statement is a {fields.json_type(value)}, not text")
    tagged = _ISSUE.search(value)
    return tagged[1].strip() if tagged else value


def _tests(row: fields.Row, kind: DatasetKind) -> dict[str, Any]:
    notes: dict[str, Any] = {}
    expected = _expected_status(row) if kind is DatasetKind.R2E else None
    fail_to_pass = row.ids("FAIL_TO_PASS", "fail_to_pass")
    pass_to_pass = row.ids("PASS_TO_PASS", "pass_to_pass")
    if expected is not None and not fail_to_pass:
        fail_to_pass = tuple(name for name, status in expected.items() if status == "PASSED")
    if kind is DatasetKind.REBENCH:
        stripped = [
            tuple(dict.fromkeys(_TIMING.sub("", i) for i in ids)) for ids in (fail_to_pass, pass_to_pass)
        ]
        if stripped != [fail_to_pass, pass_to_pass]:
            notes["timing_suffixes_stripped"] = True
        fail_to_pass, pass_to_pass = stripped
    f2p_script = row.text("f2p_script") or None
    f2p_mode = None
    if f2p_script is not None:
        f2p_mode = row.text("f2p_mode") or ("execute" if _RUNS_PYTEST.search(f2p_script) else "place")
    return {
        "fail_to_pass": fail_to_pass,
        "pass_to_pass": tuple(dict.fromkeys(pass_to_pass)),
        "known_failing": row.ids("KNOWN_FAILING", "known_failing"),
        "expected_status": expected,
        "f2p_script": f2p_script,
        "f2p_mode": f2p_mode,
        "eval_script": row.text("eval_script", "script", "eval_cmd") or None,
        "log_parser": _log_parser(row),
        "eval_type": row.text("eval_type") or "pass_and_fail",
        "test_patch": row.text("test_patch", "f2p_patch").encode() or None,
        "notes": notes,
    }


def _expected_status(row: fields.Row) -> dict[str, str]:
    key, value = row.take("expected_output_json")
    if isinstance(value, str):
        value = fields.plain({key: fields.load_json(value)})[key]
    if not isinstance(value, dict) or not value:
        raise errors.RecordRefused("expected_output_json is empty or no object of test name to status")
    if not all(isinstance(status, str) and status and name.strip() for name, status in value.items()):
        raise errors.RecordRefused("expected_output_json holds a status or a test name that is no text")
    return value


def _log_parser(row: fields.Row) -> str | None:
    name = row.text("log_parser", "parser")
    config = row.peek("install_config")
    if not name and isinstance(config, dict):
        nested = config.get("log_parser")
        if nested is not None and not isinstance(nested, str):
            raise errors.RecordRefused(f"install_config.log_parser is a {fields.json_type(nested)}, not text")
        name = nested or ""
    return name or None


def _gold(row: fields.Row, kind: DatasetKind) -> dict[str, Any]:
    if kind is not DatasetKind.SWESMITH:
        return {"gold_patch": row.text("patch", "gold_patch").encode() or None}
    bug = row.text("patch").encode()
    gold = reverse_patch(bug) if bug else None
    return {"gold_patch": gold or row.text("gold_patch").encode() or None}
