from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator import errors
from orchestrator.grading import pipeline, validate
from orchestrator.sandbox import repository

F2P = ("tests/test_calc.py::test_add",)
P2P = ("tests/test_calc.py::test_same", "tests/test_new.py::test_zero")
CALC = b"def add(a, b):\n    return a - b\n\n\ndef same(a):\n    return a\n"
FIXED = CALC.replace(b"a - b", b"a + b")
FIX = {"calc.py": FIXED}
SCRIPT = "#!/bin/bash\nexport PYTEST_DISABLE_PLUGIN_AUTOLOAD=1\nset -uxo pipefail\n{before}\n: '>>>>> Start Test Output'\n{test}\n: '>>>>> End Test Output'\ngit checkout -- tests\n"
PYTEST = "python3 -m pytest -rA -p no:cacheprovider tests"


async def test_gold_resolves_and_validates_and_the_noop_patch_does_not(bench):
    gold = await bench.grade(bench.task.gold_patch)
    assert (gold.outcome, gold.evidence, gold.exit_code, gold.flags) == ("resolved", "junit", 0, [])
    assert (gold.f2p_pass, gold.f2p_total, gold.p2p_pass, gold.p2p_total) == (1, 1, 2, 2)
    assert gold.tests == dict.fromkeys((*F2P, *P2P), "PASSED")
    assert b"3 passed" in gold.log
    noop = await bench.grade(validate.noop_patch(bench.task))
    assert (noop.outcome, noop.f2p_pass, noop.p2p_pass, noop.exit_code) == ("unresolved", 0, 2, 1)
    origins = await validate.module_origins(bench.task, bench.sandboxes[-1])
    assert origins == {"calc": "/testbed/calc.py"}
    report = validate.compare(bench.task, gold=[gold], noop=[noop], origins=origins, workdir="/testbed")
    assert report.valid, report.reasons


async def test_an_empty_patch_needs_no_sandbox_and_is_never_graded_in_one(bench):
    assert pipeline.empty_patch_grade().outcome == "empty_patch"
    assert pipeline.is_empty(b" \n\n")
    with pytest.raises(ValueError, match="empty"):
        await pipeline.grade(bench.task, b"\n", await bench.sandbox(bench.task), timeout_s=1, log_limit=1000)


async def test_a_truncated_patch_does_not_apply(bench):
    gold = bench.task.gold_patch
    grade = await bench.grade(gold[:-6])
    assert (grade.outcome, grade.evidence, grade.tests) == ("patch_apply_failed", "none", {})
    assert "calc.py" in grade.error_text or "corrupt" in grade.error_text
    assert (await bench.grade(gold[:-6] + b"\n")).outcome == "patch_apply_failed"


async def test_an_imported_patch_without_its_final_newline_gets_one(bench):
    grade = await bench.grade(bench.task.gold_patch[:-1])
    assert (grade.outcome, grade.flags) == ("resolved", ["newline_added"])


async def test_a_test_patch_that_does_not_fit_the_base_is_the_tasks_failure(bench):
    grade = await bench.grade(
        bench.task.gold_patch, test_patch=bench.task.test_patch.replace(b"calc.same", b"calc.none")
    )
    assert grade.outcome == "test_patch_failed"


async def test_a_marked_script_is_judged_by_its_tests_and_not_by_its_own_exit_code(bench):
    script = SCRIPT.format(before="cd /testbed", test=PYTEST)
    changes = {"strict": False, "targets": (), "eval_script": script}
    good = await bench.grade(bench.task.gold_patch, **changes)
    assert (good.outcome, good.evidence, good.f2p_pass, good.p2p_pass) == ("resolved", "log_text", 1, 2)
    bad = await bench.grade(validate.noop_patch(bench.task), **changes)
    assert (bad.outcome, bad.exit_code, bad.f2p_pass, bad.p2p_pass) == ("unresolved", 1, 0, 2)


async def test_a_script_that_applies_the_test_patch_itself_finds_the_base_to_apply_it_to(bench):
    hidden = bench.task.test_patch.decode()
    before = f"cd /testbed\ngit checkout -q HEAD tests/test_calc.py\ngit apply -v - <<'EOF_1'\n{hidden}EOF_1"
    script = SCRIPT.format(before=before, test=PYTEST)
    patch = bench.diff(FIX | {"tests/test_new.py": b"def test_zero(): assert 0\n"})
    grade = await bench.grade(patch, strict=False, targets=(), eval_script=script)
    assert grade.outcome == "resolved", grade.log


@pytest.mark.parametrize(
    ("test", "before", "outcome"),
    [
        ("true", "cd /testbed", "no_report"),
        (PYTEST, "exit 0", "no_report"),
        (f"{PYTEST} || true", "cd /testbed", "unresolved"),
        ("printf 'PASSED tests/test_calc.py::test_add\\n'", "cd /testbed", "unresolved"),
    ],
    ids=["nothing printed", "left before the tests", "exit code hidden", "other tests not run"],
)
async def test_a_marked_script_without_results_gives_none(bench, test, before, outcome):
    script = SCRIPT.format(before=before, test=test)
    grade = await bench.grade(validate.noop_patch(bench.task), strict=False, targets=(), eval_script=script)
    assert grade.outcome == outcome


@pytest.mark.parametrize(
    ("test", "outcome"), [("true", "resolved"), ("false", "unresolved"), ("exit 7", "unresolved")]
)
async def test_a_script_without_markers_is_judged_by_its_exit_code(bench, test, outcome):
    grade = await bench.grade(
        validate.noop_patch(bench.task), strict=False, targets=(), eval_script=f"cd /testbed\n{test}\n",
        fail_to_pass=(), pass_to_pass=(),
    )  # fmt: skip
    assert (grade.outcome, grade.evidence) == (outcome, "exit_code")


@pytest.mark.parametrize(("files", "outcome"), [(FIX, "resolved"), ({"calc.log.txt": b"x\n"}, "unresolved")])
async def test_a_python_file_is_placed_and_its_listed_tests_run(bench, files, outcome):
    name = "test_fail_to_pass.py::test_it"
    grade = await bench.grade(
        bench.diff(files | {"pytest.py": b"raise SystemExit(0)\n"}), strict=False, targets=(), test_patch=None,
        f2p_script="import calc\ndef test_it():\n    assert calc.add(2, 2) == 4\n", f2p_mode="place",
        fail_to_pass=(name,), pass_to_pass=("tests/test_calc.py::test_same",),
    )  # fmt: skip
    assert (grade.outcome, grade.evidence) == (outcome, "junit")


@pytest.mark.parametrize(("files", "outcome"), [(FIX, "resolved"), ({"x.txt": b"x\n"}, "unresolved")])
async def test_a_python_file_that_runs_pytest_itself_is_executed(bench, files, outcome):
    script = "import sys, pytest, calc\ndef test_it():\n    assert calc.add(2, 2) == 4\nif __name__ == '__main__':\n    sys.exit(pytest.main(['-q', __file__]))\n"
    grade = await bench.grade(
        bench.diff(files | {"pytest.py": b"raise SystemExit(0)\n"}), strict=False, targets=(), test_patch=None,
        f2p_script=script, f2p_mode="execute", fail_to_pass=(), pass_to_pass=(),
    )  # fmt: skip
    assert (grade.outcome, grade.evidence) == (outcome, "exit_code"), grade.log


async def test_an_expected_map_decides_over_a_printed_log(bench):
    wanted = {"test_same": "PASSED", "test_add": "PASSED", "test_zero": "PASSED"}
    script = SCRIPT.format(before="cd /testbed", test=PYTEST)
    changes = {
        "strict": False,
        "targets": (),
        "expected_status": wanted,
        "eval_script": script,
        "fail_to_pass": tuple(wanted),
        "pass_to_pass": (),
    }
    good = await bench.grade(bench.task.gold_patch, **changes)
    assert (good.outcome, good.evidence, good.f2p_pass) == ("resolved", "expected_map", 3)
    assert (await bench.grade(validate.noop_patch(bench.task), **changes)).outcome == "unresolved"


async def test_lists_alone_run_the_files_they_name(bench):
    grade = await bench.grade(bench.task.gold_patch, strict=False, targets=())
    assert (grade.outcome, grade.evidence, len(grade.tests)) == ("resolved", "junit", 3)


async def test_several_import_roots_and_a_blank_in_the_path_reach_the_tests(bench):
    patch = bench.diff(FIX | {"my lib/extra.py": b"value = 1\n"})
    hidden = bench.diff(
        bench.hidden | {"tests/test_extra.py": b"import calc, extra\ndef test_it(): assert extra.value\n"}
    )
    grade = await bench.grade(
        patch,
        import_roots=(".", "my lib"),
        test_patch=hidden,
        fail_to_pass=(*F2P, "tests/test_extra.py::test_it"),
    )
    assert grade.outcome == "resolved", grade.log


async def test_assets_are_placed_over_whatever_the_patch_put_there(bench):
    hidden = bench.diff(
        {
            "tests/test_calc.py": b"import calc\ndef test_add(): assert open('tests/a b.txt').read() == '4' and calc.add(2, 2) == 4\n"
        }
    )
    patch = bench.diff(FIX | {"tests/a b.txt/x": b"folder in the way\n"})
    grade = await bench.grade(patch, test_patch=hidden, test_assets={"tests/a b.txt": b"4"}, pass_to_pass=())
    assert grade.outcome == "resolved", grade.log


async def test_effects_of_pre_commands_stay_when_the_test_patch_only_adds_files(bench):
    hidden = bench.diff(
        {
            "tests/test_new.py": b"import calc\ndef test_zero(): assert calc.add(2, 2) == 4 and open('made.txt').read() == 'x'\n"
        }
    )
    grade = await bench.grade(
        bench.task.gold_patch, pre_commands="printf x > made.txt", test_patch=hidden,
        fail_to_pass=("tests/test_new.py::test_zero",), pass_to_pass=P2P[:1],
    )  # fmt: skip
    assert grade.outcome == "resolved", grade.log


@pytest.mark.parametrize("mark", ["xfail", "skip"])
async def test_a_listed_test_that_is_skipped_or_expected_to_fail_resolves_nothing(bench, mark):
    hidden = bench.diff(
        {
            "tests/test_calc.py": b"import calc, pytest\n@pytest.mark.%s\ndef test_add(): assert calc.add(2, 2) == 5\n"
            % mark.encode()
        }
    )
    grade = await bench.grade(bench.task.gold_patch, test_patch=hidden, pass_to_pass=())
    assert grade.outcome == "unresolved"
    assert grade.tests[F2P[0]] == {"xfail": "XFAIL", "skip": "SKIPPED"}[mark]


async def test_a_binary_file_beside_the_fix_is_applied(bench):
    grade = await bench.grade(bench.diff(FIX | {"logo.bin": bytes(range(256)) * 20}))
    assert grade.outcome == "resolved"
    assert (bench.tree() / "logo.bin").read_bytes() == bytes(range(256)) * 20


async def test_a_work_tree_below_another_repository_gets_the_patch(bench):
    bench.git(bench.folder, "init", "-q")
    assert (await bench.grade(bench.task.gold_patch)).outcome == "resolved"


@pytest.mark.parametrize(
    "changes",
    [
        {"strict": False, "targets": (), "fail_to_pass": (), "pass_to_pass": ()},
        {"fail_to_pass": ()},
        {
            "strict": False,
            "eval_script": SCRIPT.format(before="", test="true"),
            "log_parser": "parse_log_unheard_of",
        },
    ],
    ids=["no tests named", "no FAIL_TO_PASS", "unknown parser"],
)
async def test_a_record_that_cannot_be_graded_is_ungradable_and_never_resolved(bench, changes):
    assert (await bench.grade(bench.task.gold_patch, **changes)).outcome == "ungradable"


async def test_a_sandbox_that_dies_is_lost_and_never_a_verdict(bench):
    sandbox = await bench.sandbox(bench.task)
    await bench.provider.release(sandbox.key)
    with pytest.raises(errors.SandboxLost):
        await pipeline.grade(bench.task, bench.task.gold_patch, sandbox, timeout_s=30, log_limit=1000)


async def test_trouble_of_ours_is_a_grader_error(bench):
    sandbox = await bench.sandbox(bench.task)
    await repository.keep_pristine(sandbox)
    (Path(sandbox.provider_id) / "private/snapshot.git/HEAD").unlink()
    with pytest.raises(errors.GraderError):
        await pipeline.grade(bench.task, bench.task.gold_patch, sandbox, timeout_s=30, log_limit=1000)


async def test_a_log_too_long_to_keep_never_turns_into_a_verdict_about_missing_tests(bench):
    filler = "head -c 300000 /dev/zero | tr '\\0' x"
    script = SCRIPT.format(before="cd /testbed", test=f"{filler}; {PYTEST}; rc=$?; {filler}; (exit $rc)")
    grade = await bench.grade(
        bench.task.gold_patch, log_limit=2000, strict=False, targets=(), eval_script=script
    )
    assert (grade.outcome, "log_truncated" in grade.flags) == ("no_report", True)
