from __future__ import annotations

import pytest

from orchestrator.grading.placement import Change
from orchestrator.grading.shadowing import find_shadows
from orchestrator.grading.task_files import TaskFiles
from orchestrator.tasks.record import DatasetKind, Task

BASE = ("pkg/__init__.py", "pkg/a.py", "pkg/tests/__init__.py", "pkg/tests/test_a.py", "pkg/tests/base.py",
        "checks/test_b.py", "checks/support.py", "bin/test", "Makefile")  # fmt: skip
MARKED = "git apply x\n: '>>>>> Start Test Output'\n{}\n: '>>>>> End Test Output'\npytest late.sh\n"


def task(**changes) -> Task:
    record = {
        "instance_id": "t",
        "dataset_kind": DatasetKind.LOCAL,
        "workdir": "/testbed",
        "problem_statement": "x",
    }
    return Task(**(record | changes))


def change(path: str, status: str = "M", *, mode: str = "100644") -> Change:
    old, new = ("000000" if status == "A" else mode), ("000000" if status == "D" else mode)
    return Change(path, old, new, "1" * 40, "2" * 40, status)


def gold(*paths: str) -> bytes:
    return b"".join(b"diff --git a/%s b/%s\n" % ((path.encode(),) * 2) for path in paths)


A, B = "pkg/tests/test_a.py::test_x[a/b.c]", "checks/test_b.py::T::test_y"


@pytest.mark.parametrize(
    ("record", "changed", "ruling"),
    [
        ({"fail_to_pass": (A,)}, change("pkg/tests/test_a.py"), "test_file_restored"),
        ({"pass_to_pass": (A,)}, change("pkg/tests/test_a.py", "D"), "test_file_restored"),
        ({"fail_to_pass": (A,)}, change("pkg/tests/base.py"), "test_file_restored"),
        ({"fail_to_pass": (A,)}, change("pkg/tests", "A"), "test_file_restored"),
        ({"fail_to_pass": (A,)}, change("pkg/tests/test_new.py", "A"), None),
        ({"fail_to_pass": (A,)}, change("pkg/a.py"), None),
        ({"fail_to_pass": (A,)}, change("checks/test_b.py"), "test_file_changed"),
        ({"fail_to_pass": ("pkg/a.py::pkg.a.f",)}, change("pkg/a.py"), None),
        ({"fail_to_pass": ("/testbed/pkg/tests/test_a.py::x",)}, change("pkg/tests/test_a.py"), "test_file_restored"),
        ({"fail_to_pass": (A,), "gold_patch": gold("pkg/tests/test_a.py")}, change("pkg/tests/test_a.py"), "test_file_changed"),
        ({"fail_to_pass": ("new/test_n.py::x",)}, change("new/test_n.py", "A"), "test_file_restored"),
        ({"targets": ("checks",), "gold_patch": gold("pkg/a.py")}, change("checks/support.py"), "test_file_restored"),
        ({"targets": ("checks",)}, change("checks/support.py"), "test_file_changed"),
        ({"targets": ("checks",)}, change("checks/test_b.py"), "test_file_restored"),
        ({"targets": ("checks",)}, change("checks/test_new.py", "A"), "test_file_restored"),
        ({"targets": ("checks",)}, change("checks/data.json", "A"), None),
        ({"targets": ("pkg",), "gold_patch": gold("pkg/a.py")}, change("pkg/a.py"), None),
        ({"targets": ("pkg",), "gold_patch": gold("pkg/__init__.py")}, change("pkg/a.py"), "test_file_changed"),
        ({"targets": (".",), "fail_to_pass": (B,)}, change("pkg/a.py"), None),
        ({"targets": (".",), "fail_to_pass": (B,)}, change("pkg/tests/test_a.py"), "test_file_restored"),
        ({"eval_script": MARKED.format("bin/test -C x")}, change("bin/test", mode="100755"), "test_file_restored"),
        ({"eval_script": MARKED.format("cd /testbed; ./run.sh")}, change("run.sh"), "test_file_restored"),
        ({"eval_script": MARKED.format("true")}, change("late.sh"), None),
        ({"eval_script": MARKED.format("python setup.py test")}, change("setup.py"), "test_file_changed"),
        ({"eval_script": MARKED.format("pytest /testbed/pkg/tests")}, change("pkg/tests/base.py"), "test_file_restored"),
        ({"eval_script": "make"}, change("checks/test_b.py"), "test_file_restored"),
        ({"expected_status": {"test_x": "PASSED"}}, change("run_tests.sh"), "test_file_restored"),
        ({"dataset_kind": DatasetKind.R2E, "eval_script": "true"}, change("r2e_tests/test_1.py", "A"), "test_file_restored"),
    ],
)  # fmt: skip
def test_what_belongs_to_the_task_is_put_back_and_what_may_be_code_is_left(record, changed, ruling):
    assert TaskFiles(task(**record), BASE).rule(changed) == ruling


def test_the_import_path_starts_at_the_first_folder_above_a_test_that_is_no_package():
    listed = {"fail_to_pass": (A, B), "import_roots": (".", "python/x/")}
    assert TaskFiles(task(**listed), BASE).import_roots() == {"", "python/x", "src", "lib", "checks"}


@pytest.mark.parametrize(
    ("added", "base", "expected"),
    [
        (["iniconfig.py"], [], ["iniconfig.py"]),
        (["xml/__init__.py", "xml/sub/x.py", "xmlx.py"], [], ["xml/__init__.py", "xml/sub/x.py"]),
        (["_json.cpython-311-x86_64-linux-gnu.so"], [], ["_json.cpython-311-x86_64-linux-gnu.so"]),
        (["src/os.py"], [], ["src/os.py"]),
        (["pytest_cov/__init__.py"], [], ["pytest_cov/__init__.py"]),
        (["code/example.py", "site/index.html", "pkg/types.py", "platform.md", "test/__init__.py"], [], []),
        (["profile/more.py", "profile.py"], ["profile/__init__.py"], []),
        (["_pytest/new.py", "_pytest/__init__.pyc"], ["_pytest/__init__.py"], []),
    ],
)
def test_an_added_module_of_a_protected_name_at_an_import_root_is_a_shadow(added, base, expected):
    changes = [change(path, "A") for path in added] + [change("re.py")]
    assert find_shadows(changes, {"", "src"}, base) == set(expected)


def test_a_link_with_the_name_of_a_package_is_a_shadow():
    assert find_shadows(
        [change("json", "A", mode="120000"), change("docs", "A", mode="120000")], {""}, []
    ) == {"json"}
