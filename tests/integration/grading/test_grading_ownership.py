from __future__ import annotations

import pytest

from orchestrator.tasks.record import DatasetKind

pytestmark = pytest.mark.long

TEST = b"import calc\n\n\ndef test_add():\n    assert calc.add(2, 2) == 4\n\n\ndef test_same():\n    assert calc.same(1) == 1\n"
CALC = b"def add(a, b):\n    return a - b\n\n\ndef same(a):\n    return a\n"
FIX = {"calc.py": CALC.replace(b"a - b", b"a + b")}
EMPTY = b"def test_add(): pass\ndef test_same(): pass\n"
F2P, P2P = "tests/test_calc.py::test_add", "tests/test_calc.py::test_same"
MARKED = "cd /testbed\n: '>>>>> Start Test Output'\npython3 -m pytest -rA -p no:cacheprovider tests\n: '>>>>> End Test Output'\n"
RUNNER = b"python3 -m pytest -rA -p no:cacheprovider tests\n"
BASE = {
    "calc.py": CALC,
    "tests/test_calc.py": TEST,
    "tests/values.txt": b"4\n",
    "run_tests.sh": RUNNER,
    "setup.cfg": b"[tool:pytest]\naddopts = -q -p no:hypothesispytest -p no:asyncio -p no:anyio -p no:timeout\n",
}
LISTED = {"strict": False, "targets": (), "test_patch": None, "fail_to_pass": (F2P,), "pass_to_pass": (P2P,)}
RECORDS = {
    "listed": LISTED,
    "swe-smith": LISTED | {"dataset_kind": DatasetKind.SWESMITH, "eval_script": MARKED},
    "marked script": LISTED | {"eval_script": MARKED},
    "script": LISTED | {"eval_script": "cd /testbed\npython3 -m pytest -q tests/test_calc.py\n"},
    "script over a folder, nothing listed": LISTED
    | {"eval_script": "cd /testbed; python3 -m pytest -q tests", "fail_to_pass": (), "pass_to_pass": ()},
    "strict": LISTED | {"strict": True},
    "strict over a folder": LISTED | {"strict": True, "targets": ("tests",)},
    "strict over everything": LISTED | {"strict": True, "targets": (".",)},
    "r2e": LISTED
    | {
        "dataset_kind": DatasetKind.R2E,
        "expected_status": {"test_add": "PASSED", "test_same": "PASSED"},
        "fail_to_pass": ("test_add", "test_same"),
        "pass_to_pass": (),
    },
}


@pytest.fixture
def owned(bench, monkeypatch):
    """The bench over a base that holds its tests, as most public records have it."""
    bench.rebase(BASE)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    return bench


@pytest.mark.parametrize("record", RECORDS)
async def test_editing_the_listed_test_instead_of_fixing_the_code_resolves_nothing(owned, record):
    grade = await owned.grade(owned.diff({"tests/test_calc.py": EMPTY}), **RECORDS[record])
    assert (grade.outcome, grade.flags) == ("unresolved", ["test_file_restored:tests/test_calc.py"]), (
        grade.log
    )


@pytest.mark.parametrize("record", ["listed", "marked script", "strict over everything", "r2e"])
async def test_a_fix_still_resolves_when_it_edits_or_deletes_the_test(owned, record):
    deleted = owned.diff(FIX, remove=("tests/test_calc.py",))
    for patch in (owned.diff(FIX | {"tests/test_calc.py": EMPTY}), deleted):
        grade = await owned.grade(patch, **RECORDS[record])
        assert grade.outcome == "resolved", grade.log
        assert (owned.tree() / "tests/test_calc.py").read_bytes() == TEST


async def test_a_test_added_below_a_target_folder_is_taken_out_and_its_data_are_put_back(owned):
    patch = owned.diff(FIX | {"tests/test_more.py": b"def test_x(): assert 0\n", "tests/values.txt": b"5\n"})
    grade = await owned.grade(patch, **RECORDS["strict over a folder"])
    assert set(grade.flags) == {
        "test_file_restored:tests/test_more.py",
        "test_file_restored:tests/values.txt",
    }
    assert (grade.outcome, grade.exit_code) == ("resolved", 0)
    assert not (owned.tree() / "tests/test_more.py").exists()


async def test_a_file_in_the_place_of_the_test_folder_gives_way_to_it(owned):
    patch = owned.diff(FIX | {"tests": b"x\n"}, remove=("tests/test_calc.py", "tests/values.txt"))
    grade = await owned.grade(patch, **LISTED)
    assert grade.outcome == "resolved"
    assert "test_file_restored:tests" in grade.flags


async def test_a_replaced_test_runner_of_an_r2e_record_is_put_back(owned):
    forged = b"echo PASSED tests/test_calc.py::test_add; echo PASSED tests/test_calc.py::test_same\n"
    grade = await owned.grade(owned.diff({"run_tests.sh": forged}), **RECORDS["r2e"])
    assert (grade.outcome, grade.flags) == ("unresolved", ["test_file_restored:run_tests.sh"])


async def test_a_replaced_program_that_the_records_script_runs_is_put_back(owned):
    script = MARKED.replace("python3 -m pytest -rA -p no:cacheprovider tests", "bash ./run_tests.sh")
    forged = b"echo PASSED tests/test_calc.py::test_add; echo PASSED tests/test_calc.py::test_same\n"
    grade = await owned.grade(owned.diff({"run_tests.sh": forged}), **LISTED | {"eval_script": script})
    assert (grade.outcome, grade.flags) == ("unresolved", ["test_file_restored:run_tests.sh"])


async def test_a_file_the_graders_own_goes_over_is_flagged(owned):
    script = {"f2p_script": TEST.decode(), "f2p_mode": "place"}
    names = {
        "fail_to_pass": ("test_fail_to_pass.py::test_add",),
        "pass_to_pass": (),
        "test_assets": {"a.txt": b"x"},
    }
    patch = owned.diff({"test_fail_to_pass.py": EMPTY, "a.txt": b"y"})
    grade = await owned.grade(patch, **LISTED | script | names)
    flags = {"test_file_restored:test_fail_to_pass.py", "test_file_restored:a.txt"}
    assert (grade.outcome, set(grade.flags)) == ("unresolved", flags)


FORGE = b"""import os, sys
print('=' * 10 + ' short test summary info ' + '=' * 10)
for n in ('test_add', 'test_same'): print('PA' + 'SSED tests/test_calc.py::' + n)
sys.stdout.flush()
getattr(os, '_ex' + 'it')(0)
"""


@pytest.mark.parametrize(
    ("record", "path"),
    [
        ("marked script", "iniconfig.py"),
        ("script", "pluggy/__init__.py"),
        ("listed", "tests/xml.py"),
        ("strict over a folder", "json.py"),
        ("marked script", "xml/__init__.py"),
    ],
)
async def test_a_module_that_shadows_the_runners_or_the_interpreters_is_taken_out(owned, record, path):
    grade = await owned.grade(owned.diff({path: FORGE}), **RECORDS[record])
    assert grade.outcome == "unresolved", grade.log
    assert f"shadow:{path}" in grade.flags
    assert "suspicious:split_string" in grade.flags
    assert not (owned.tree() / path).exists()


async def test_a_module_of_that_name_that_the_base_has_may_be_changed(owned):
    owned.rebase(BASE | {"profile.py": b"x = 1\n", "calc.py": b"import profile\n" + CALC})
    fix = {"profile.py": b"x = 2\n", "calc.py": FIX["calc.py"] + b"import profile\nassert profile.x == 2\n"}
    grade = await owned.grade(owned.diff(fix), **RECORDS["listed"])
    assert (grade.outcome, grade.flags) == ("resolved", [])
