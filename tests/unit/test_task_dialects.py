from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator import errors
from orchestrator.tasks.dialects import normalise
from orchestrator.tasks.record import DatasetKind, Task

DATA = Path(__file__).parent.parent / "data" / "tasks" / "dialects.jsonl"
ROWS = [json.loads(line) for line in DATA.read_text().splitlines()]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
DIFF = ROWS[0]["test_patch"]


def row(marker: str) -> dict[str, Any]:
    """The data file's row whose text contains the marker."""
    return next(dict(r) for r in ROWS if marker in json.dumps(r))


def task_of(record: dict[str, Any], **options) -> Task:
    return normalise(record, base_dir=Path("/nowhere"), **options)


KINDS = [
    ("owner__classic-1", "swebench", "/testbed", "swebench/sweb.eval.x86_64.owner_1776_classic-1:latest"),
    ("owner__v5-2", "swebench_v5", "/testbed", "registry.example/v5:latest"),
    ("owner__gym-3", "swegym", "/testbed", "xingyaoww/sweb.eval.x86_64.owner_s_gym-3:latest"),
    ("owner__smith.0123.bug", "swesmith", "/testbed", "registry.example/smith"),
    ("aiohttp__0123456789ab", "r2e", "/testbed", "registry.example/aiohttp_final:abc"),
    ("owner__live-6", "swelive", "/testbed", "registry.example/live"),
    ("owner__rebench-7", "rebench", "/rebench", "registry.example/rebench"),
    ("instance_owner__pro-0123-vnan", "swepro", "/app", "jefzda/sweap-images:owner.pro-0123"),
    ("user_repo_pr9", "scaleswe", "/workspace/repo", "registry.example/scale"),
    ("slime-10", "slime", "/repo", "registry.example/slime"),
    ("slime-11", "slime", "/repo", "registry.example/slime"),
    ("areal-12", "areal", "/app/code", None),
]


@pytest.mark.parametrize(
    ("index", "expected"), list(enumerate(KINDS)), ids=[f"{kind[1]}-{kind[0]}" for kind in KINDS]
)
def test_every_dialect_gives_its_kind_folder_and_image(index, expected):
    task = task_of(ROWS[index])
    assert (task.instance_id, task.dataset_kind.value, task.workdir, task.image) == expected
    assert task.problem_statement == "Fix it."


def test_a_classic_row_keeps_its_patches_as_bytes_and_its_other_keys_as_extra():
    task = task_of(row("owner__classic-1"))
    assert task.test_patch == DIFF.encode()
    assert task.gold_patch is not None
    assert task.fail_to_pass == ("tests/test_a.py::test_x",)
    assert task.pass_to_pass == ("tests/test_a.py::test_y",)
    assert task.base_commit == COMMIT
    assert task.extra == {"version": "1.0", "environment_setup_commit": COMMIT, "hints_text": "a hint"}


def test_a_v5_row_keeps_script_parser_and_eval_type():
    task = task_of(row("owner__v5-2"))
    assert (task.log_parser, task.eval_type) == ("parse_log_pytest", "fail_only")
    assert task.eval_script is not None
    assert ">>>>> Start Test Output" in task.eval_script


def test_the_gold_patch_of_a_swesmith_row_is_its_bug_reversed():
    gold = task_of(row("owner__smith")).gold_patch
    assert gold == b"diff --git a/a.py b/a.py\n--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-bad\n+good\n"


def test_an_r2e_row_has_its_expected_map_and_no_base_commit():
    task = task_of(row("expected_output_json"))
    assert task.expected_status == {"test_x": "PASSED", "test_y": "FAILED", "test_z": "PASSED"}
    assert task.fail_to_pass == ("test_x", "test_z")
    assert task.base_commit is None
    assert task.extra["commit_hash"] == COMMIT


def test_an_r2e_statement_without_tags_is_taken_whole():
    assert task_of(row("aiohttp") | {"problem_statement": "Just this."}).problem_statement == "Just this."


def test_timing_suffixes_of_rebench_are_stripped_and_that_is_noted():
    task = task_of(row("owner__rebench-7"))
    assert task.fail_to_pass == ("tests/test_a.py::test_x",)
    assert task.pass_to_pass == ("tests/test_a.py::test_y", "tests/test_a.py::test_z[3 ms]")
    assert task.extra["timing_suffixes_stripped"] is True
    assert task.log_parser == "parse_log_pytest"


def test_the_first_edition_of_rebench_works_in_testbed():
    assert task_of(row("owner__rebench-7") | {"version": "1.0"}).workdir == "/testbed"


def test_python_literals_of_swepro_are_read():
    task = task_of(row("instance_owner__pro"))
    assert task.fail_to_pass == ("tests/test_a.py::test_x", "tests/test_a.py::test_it's")
    assert task.targets == ("tests/test_a.py",)
    assert task.extra["before_repo_set_cmd"].startswith("git reset")


def test_a_long_swepro_tag_is_cut_as_the_published_images_were():
    image = task_of(row("instance_owner__pro") | {"dockerhub_tag": "t" * 200}).image
    assert image == "jefzda/sweap-images:" + "t" * 128


def test_a_scaleswe_row_names_its_parent_patch_and_commands():
    task = task_of(row("user_repo_pr9"))
    assert (task.repo, task.base_commit, task.f2p_mode) == ("user/repo", COMMIT, "place")
    assert task.test_patch == DIFF.encode()
    assert task.pre_commands == "git checkout 0123\n"


def test_a_scaleswe_row_without_a_workdir_lies_under_workspace():
    record = row("user_repo_pr9")
    del record["workdir"]
    assert task_of(record).workdir == "/workspace/repo"


def test_slime_rows_are_graded_by_exit_code():
    assert task_of(row("slime-10")).eval_script == "pytest tests"
    task = task_of(row("slime-11"))
    assert task.f2p_mode == "execute"
    assert task.extra == {"label": "x"}


def test_slime_metadata_may_be_json_text():
    record = row("slime-10")
    assert task_of(record | {"metadata": json.dumps(record["metadata"])}) == task_of(record)


def test_an_areal_row_is_graded_by_exit_code_and_keeps_its_overrides():
    task = task_of(row("areal-12"))
    assert task.fail_to_pass == ()
    assert task.extra == {"econfig": {"step_limit": 3}}


def test_repo_dir_is_workdir_under_another_name():
    record = row("areal-12")
    del record["workdir"]
    assert task_of(record | {"repo_dir": "/src/code/"}).workdir == "/src/code"


def test_a_row_that_names_only_an_image_is_accepted():
    record = {
        "instance_id": "a", "problem_statement": "b", "image": "registry.example/a", "FAIL_TO_PASS": ["t.py::x"]
    }  # fmt: skip
    assert task_of(record).repo_source is None


def test_a_kind_from_the_configuration_holds_unless_the_row_names_one():
    record = row("owner__classic-1")
    assert task_of(record, kind=DatasetKind.SWEGYM).dataset_kind is DatasetKind.SWEGYM
    named = record | {"dataset_kind": "swelive"}
    assert task_of(named, kind=DatasetKind.SWEGYM).dataset_kind is DatasetKind.SWELIVE


def test_image_names_follow_a_template_of_the_caller():
    images = {DatasetKind.SWEBENCH: "mirror.example/{id_1776}"}
    assert task_of(row("owner__classic-1"), images=images).image == "mirror.example/owner_1776_classic-1"


SPELLINGS: dict[str, dict[str, Any]] = {
    "list": {"FAIL_TO_PASS": ["a.py::x", "a.py::y[it's]"]},
    "json-text": {"FAIL_TO_PASS": '["a.py::x", "a.py::y[it\'s]"]'},
    "python-literal": {"FAIL_TO_PASS": "['a.py::x', \"a.py::y[it's]\"]"},
    "python-tuple": {"FAIL_TO_PASS": "('a.py::x', 'a.py::y[it\\'s]')"},
    "lower-case-key": {"fail_to_pass": ["a.py::x", "a.py::y[it's]"]},
    "empty-upper-case-key": {"FAIL_TO_PASS": "", "fail_to_pass": ["a.py::x", "a.py::y[it's]"]},
    "null-upper-case-key": {"FAIL_TO_PASS": None, "fail_to_pass": '["a.py::x", "a.py::y[it\'s]"]'},
}


def test_every_spelling_of_a_list_gives_the_same_task_and_digest():
    base: dict[str, Any] = {"instance_id": "a", "problem_statement": "b", "repo": "o/r"}
    tasks = [task_of(base | spelling) for spelling in SPELLINGS.values()]
    assert tasks[0].fail_to_pass == ("a.py::x", "a.py::y[it's]")
    assert all(task == tasks[0] for task in tasks)
    assert len({task.sha256 for task in tasks}) == 1


def test_several_issues_are_joined_and_numbered():
    record = row("areal-12") | {"problem_statement": ["First.\n", "Second."]}
    assert task_of(record).problem_statement == "Issue 1:\n\nFirst.\n\nIssue 2:\n\nSecond."


def test_a_single_issue_in_a_list_is_taken_as_it_is():
    assert task_of(row("areal-12") | {"problem_statement": ["Only."]}).problem_statement == "Only."


def test_an_eval_script_that_names_a_file_is_text_and_the_file_is_not_read(tmp_path):
    secret = tmp_path / "eval.sh"
    secret.write_text("exit 0")
    assert task_of(row("areal-12") | {"eval_script": str(secret)}).eval_script == str(secret)


def test_line_ends_of_a_patch_survive():
    patch = DIFF.replace("old\n", "old\r\n")
    assert task_of(row("owner__classic-1") | {"test_patch": patch}).test_patch == patch.encode()


def test_what_a_trainer_adds_for_one_rollout_is_no_part_of_the_task():
    record = row("areal-12")
    task = task_of(record | {"override_api_key": "sk-planted-secret", "override_base_url": "http://x"})
    assert "sk-planted-secret" not in task.to_json()
    assert task.sha256 == task_of(record).sha256


def test_a_task_survives_its_own_json():
    for record in ROWS:
        task = task_of(record)
        assert Task.model_validate_json(task.to_json()) == task


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
KEYS = sorted(
    {key for record in ROWS for key in record}
    | {"strict", "timeout_s", "repo_path", "repo_archive", "script"}
)


@settings(max_examples=150, deadline=None)
@given(
    base=st.sampled_from(ROWS), changes=st.dictionaries(st.sampled_from(KEYS) | st.text(), JSON, max_size=4)
)
def test_any_record_gives_a_task_or_a_refusal(base, changes):
    reason = ""
    try:
        task = task_of(base | changes)
    except errors.RecordRefused as refusal:
        reason = str(refusal)
    else:
        assert Task.model_validate_json(task.to_json()).sha256 == task.sha256
        return
    assert 0 < len(reason) < 600
