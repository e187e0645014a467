from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator import errors
from orchestrator.tasks.source import Loaded, load_tasks

DATA = Path(__file__).parent.parent / "data" / "tasks" / "dialects.jsonl"


def areal(instance_id: str, **changes) -> dict[str, Any]:
    return {"instance_id": instance_id, "problem_statement": "p", "eval_script": "exit 0"} | changes


def load(path: Path, tmp_path: Path) -> Loaded:
    return load_tasks(path, cache_dir=tmp_path / "cache")


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def test_a_broken_line_is_refused_with_its_place_and_the_rest_still_loads(tmp_path):
    path = write(
        tmp_path / "rows.jsonl", areal("first"), '{"instance_id": "broken", \n', "\n", areal("last", workdir="here"), areal("good")
    )  # fmt: skip
    loaded = load(path, tmp_path)
    assert [task.instance_id for task in loaded.tasks] == ["first", "good"]
    assert [(r.where, r.instance_id) for r in loaded.refused] == [(f"{path}:2", None), (f"{path}:4", "last")]
    assert "not valid JSON" in loaded.refused[0].reason
    assert str(loaded.refused[1]).startswith(f"{path}:4 (last): workdir is here")


def test_repeated_instance_ids_are_all_loaded(tmp_path):
    path = write(tmp_path / "rows.jsonl", *[areal("same")] * 64)
    assert len(load(path, tmp_path).tasks) == 64


def test_lines_end_at_line_feeds_only(tmp_path):
    path = tmp_path / "rows.jsonl"
    text = json.dumps(areal("a", problem_statement="one\u2028two\x85three"), ensure_ascii=False)
    path.write_bytes(text.encode() + b"\r\n" + json.dumps(areal("b")).encode())
    loaded = load(path, tmp_path)
    assert [task.instance_id for task in loaded.tasks] == ["a", "b"]
    assert loaded.tasks[0].problem_statement == "one\u2028two\x85three"


def test_a_byte_order_mark_is_no_part_of_the_first_record(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(areal("a")).encode())
    assert [task.instance_id for task in load(path, tmp_path).tasks] == ["a"]


def test_a_json_file_holds_a_list_of_records(tmp_path):
    path = write(tmp_path / "rows.json", json.dumps([areal("a"), 5, areal("b", workdir=7)]))
    loaded = load(path, tmp_path)
    assert [task.instance_id for task in loaded.tasks] == ["a"]
    assert [refusal.where for refusal in loaded.refused] == [f"{path}[1]", f"{path}[2]"]


@pytest.mark.parametrize(
    "line", ["5", "null", "[]", '"text"', "true", "[" * 100_000, '{"a":' * 5_000, "1" * 5_000]
)
def test_a_line_that_is_no_object_is_refused(tmp_path, line):
    loaded = load(write(tmp_path / "rows.jsonl", line + "\n", areal("a")), tmp_path)
    assert len(loaded.tasks) == len(loaded.refused) == 1


UNREADABLE = {
    "missing": ("missing.jsonl", None, "does not exist"),
    "empty": ("empty.jsonl", b"", "is empty"),
    "blank": ("blank.jsonl", b" \n\n", "is empty"),
    "utf-16": ("utf16.jsonl", '{"a": 1}\n'.encode("utf-16"), "is not UTF-8 text (line 1)"),
    "latin-1": ("latin.jsonl", b'{"a": 1}\n{"a": "\xe9"}\n', "is not UTF-8 text (line 2)"),
    "unknown suffix": ("rows.parquet", b"PAR1", "is of no known kind"),
    "empty list": ("rows.json", b"[]", "is an empty list"),
    "no list": ("rows.json", b"5", "holds a number"),
    "broken json": ("rows.json", b'[{"a": ', "not valid JSON"),
}


@pytest.mark.parametrize(
    ("name", "data", "reason"), UNREADABLE.values(), ids=[k.replace(" ", "-") for k in UNREADABLE]
)
def test_a_file_that_cannot_be_read_as_a_whole_is_an_error(tmp_path, name, data, reason):
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(errors.TaskFileError) as caught:
        load(tmp_path / name, tmp_path)
    assert reason in str(caught.value)


def test_a_folder_without_tasks_is_an_error(tmp_path):
    (tmp_path / "notes").mkdir()
    with pytest.raises(errors.TaskFileError, match="holds no tasks"):
        load(tmp_path, tmp_path)


def test_a_folder_gives_its_task_folders_and_record_files_in_order(tmp_path):
    tasks = tmp_path / "tasks"
    (tasks / "b").mkdir(parents=True)
    (tasks / "b" / "task.yaml").write_text("instance_id: folder\nstrict: true\n")
    (tasks / "b" / "problem_statement.md").write_text("p")
    (tasks / "b" / "tests.json").write_text('{"FAIL_TO_PASS": ["t.py::x"]}')
    write(tasks / "a.jsonl", areal("line"))
    write(tasks / "README.txt", "no task")
    assert [task.instance_id for task in load(tasks, tmp_path).tasks] == ["line", "folder"]


def test_local_sources_are_found_beside_the_file(tmp_path):
    data = tmp_path / "data"
    for name in ("plain", "work/.git", "bare/objects", "bare/refs"):
        (data / name).mkdir(parents=True)
    (data / "bare" / "HEAD").write_text("ref: refs/heads/main\n")
    (data / "repo.tar").write_bytes(b"x")
    digest = "a" * 64
    path = write(
        data / "rows.jsonl",
        areal("plain", repo_path="plain"),
        areal("work", repo_path="work"),
        areal("bare", repo_path=str(data / "bare")),
        areal("archive", repo_archive="repo.tar", repo_archive_sha256=digest),
    )
    sources = [task.repo_source for task in load(path, tmp_path).tasks]
    assert [(s.kind, s.path, s.sha256) for s in sources if s] == [
        ("tree", data / "plain", None),
        ("git", data / "work", None),
        ("git", data / "bare", None),
        ("archive", data / "repo.tar", digest),
    ]


def test_where_the_source_lies_takes_no_part_in_the_digest(tmp_path):
    digests = []
    for name in ("one", "two"):
        folder = tmp_path / name
        (folder / "plain").mkdir(parents=True)
        digests.append(
            load(write(folder / "r.jsonl", areal("a", repo_path="plain")), tmp_path).tasks[0].sha256
        )
    assert digests[0] == digests[1]
