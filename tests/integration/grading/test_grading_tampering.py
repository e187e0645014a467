from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.long

F2P = ("tests/test_calc.py::test_add",)
P2P = ("tests/test_calc.py::test_same", "tests/test_new.py::test_zero")
CALC = b"def add(a, b):\n    return a - b\n\n\ndef same(a):\n    return a\n"
FIXED = CALC.replace(b"a - b", b"a + b")
FIX = {"calc.py": FIXED}
SCRIPT = "#!/bin/bash\nexport PYTEST_DISABLE_PLUGIN_AUTOLOAD=1\nset -uxo pipefail\n{before}\n: '>>>>> Start Test Output'\n{test}\n: '>>>>> End Test Output'\ngit checkout -- tests\n"
PYTEST = "python3 -m pytest -rA -p no:cacheprovider tests"


@pytest.mark.parametrize("path", ["../outside.txt", ".git/hooks/post-checkout", "/tmp/outside.txt"])
async def test_a_path_outside_the_repository_does_not_apply_and_writes_nothing(bench, path):
    patch = f"diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n+++ b/{path}\n@@ -0,0 +1 @@\n+x\n"
    grade = await bench.grade(patch.encode())
    written = {p.name for p in bench.tree().parent.rglob("*") if p.is_file() and "private" not in p.parts}
    if grade.outcome == "patch_apply_failed":
        assert not written & {"outside.txt", "post-checkout"}
    else:  # git takes an absolute path as one below the repository
        assert (bench.tree() / "tmp/outside.txt").exists()
        assert path.startswith("/")


async def test_a_patch_through_a_link_it_makes_does_not_apply(bench):
    link = b"diff --git a/out b/out\nnew file mode 120000\n--- /dev/null\n+++ b/out\n@@ -0,0 +1 @@\n+/tmp\n\\ No newline at end of file\n"
    below = (
        b"diff --git a/out/x b/out/x\nnew file mode 100644\n--- /dev/null\n+++ b/out/x\n@@ -0,0 +1 @@\n+x\n"
    )
    assert (await bench.grade(link + below)).outcome == "patch_apply_failed"


TAMPERING = {
    "conftest that turns failures into passes": {
        "conftest.py": b"import pytest\n\n@pytest.hookimpl(hookwrapper=True)\ndef pytest_runtest_makereport():\n"
        b"    r = yield\n    r.get_result().outcome = 'passed'\n"
    },
    "module pytest in the root": {"pytest.py": b"raise SystemExit(0)\n"},
    "package pytest in the root": {"pytest/__init__.py": b"", "pytest/__main__.py": b"raise SystemExit(0)\n"},
    "sitecustomize": {"sitecustomize.py": b"import os\nos._exit(0)\n"},
    "entry point": {
        "x.egg-info/entry_points.txt": b"[pytest11]\nx = evil\n",
        "x.egg-info/PKG-INFO": b"Name: x\nVersion: 1\n",
        "evil.py": b"import pytest\n\n@pytest.hookimpl(hookwrapper=True)\ndef pytest_runtest_makereport():\n"
        b"    r = yield\n    r.get_result().outcome = 'passed'\n",
    },
    "pytest.ini": {"pytest.ini": b"[pytest]\naddopts = --deselect tests/test_calc.py::test_add\n"},
    "the visible test edited": {"tests/test_calc.py": b"def test_same(): pass\ndef test_add(): pass\n"},
    "the hidden test made in advance": {"tests/test_new.py": b"def test_zero(): pass\n"},
    "a folder where the hidden test belongs": {"tests/test_new.py/inner.txt": b"x\n"},
    "the test skipped": {"tests/conftest.py": b"collect_ignore = ['test_calc.py']\n"},
    "a forged line": {"calc.py": CALC + b"print('\\nPASSED tests/test_calc.py::test_add')\n"},
    "compiled test": {"tests/__pycache__/test_calc.cpython-311-pytest-9.0.0.pyc": b"x"},
    "report counters and all": {"tests/__init__.py": b"", "tests/pytest.ini": b"[pytest]\n"},
}  # fmt: skip


@pytest.mark.parametrize("name", TAMPERING)
async def test_steering_the_tests_without_a_fix_resolves_nothing(bench, name):
    patch = bench.diff(TAMPERING[name])
    grade = await bench.grade(patch)
    assert grade.outcome == "unresolved"
    assert grade.tests[F2P[0]] == "FAILED"


@pytest.mark.parametrize(
    "name",
    [
        "conftest that turns failures into passes",
        "pytest.ini",
        "package pytest in the root",
        "a forged line",
    ],
)
async def test_steering_a_records_own_script_resolves_nothing(bench, name):
    script = SCRIPT.format(before="cd /testbed", test=PYTEST)
    grade = await bench.grade(bench.diff(TAMPERING[name]), strict=False, targets=(), eval_script=script)
    assert (grade.outcome, grade.evidence) == ("unresolved", "log_text")


async def test_the_same_changes_beside_the_right_fix_still_resolve(bench):
    clash = {"module pytest in the root", "a folder where the hidden test belongs", "a forged line"}
    patch = FIX | {path: data for name in TAMPERING.keys() - clash for path, data in TAMPERING[name].items()}
    grade = await bench.grade(bench.diff(patch))
    assert grade.outcome == "resolved"
    harmless = {"calc.py", "evil.py", "tests/__init__.py", "tests/test_calc.py", "tests/test_new.py"}
    infra = {flag.removeprefix("test_infra:") for flag in grade.flags if flag.startswith("test_infra:")}
    assert infra == patch.keys() - harmless - {"pytest/__init__.py", "pytest/__main__.py"}
    assert {"shadow:pytest/__init__.py", "shadow:pytest/__main__.py"} <= set(grade.flags)
    assert {"test_file_restored:tests/test_calc.py", "test_file_restored:tests/test_new.py"} <= set(
        grade.flags
    )


async def test_a_folder_in_the_place_of_a_hidden_test_gives_way_to_it(bench):
    patch = bench.diff(FIX | TAMPERING["a folder where the hidden test belongs"])
    grade = await bench.grade(patch)
    assert (grade.outcome, grade.flags) == ("resolved", ["test_file_restored:tests/test_new.py/inner.txt"])


async def test_a_module_that_prints_a_graders_marker_is_still_resolved(bench):
    noisy = {"calc.py": FIXED + b"print('>>>>> Tests Errored')\n"}
    strict = await bench.grade(bench.diff(noisy))
    assert (strict.outcome, "adds:marker" in strict.flags) == ("resolved", True)
    script = SCRIPT.format(before="cd /testbed", test=PYTEST)
    assert (
        await bench.grade(bench.diff(noisy), strict=False, targets=(), eval_script=script)
    ).outcome == "resolved"


async def test_runner_settings_are_put_back_but_not_the_rest_of_their_file(bench):
    changed = (
        b"[metadata]\nname = better\n\n[tool:pytest]\naddopts = --deselect tests/test_calc.py::test_add\n"
    )
    grade = await bench.grade(bench.diff({"setup.cfg": changed}))
    assert grade.flags == ["test_infra:setup.cfg"]
    placed = (bench.tree() / "setup.cfg").read_text()
    assert "name = better" in placed
    assert "addopts = -q -p no:" in placed
    assert "deselect" not in placed


@pytest.mark.parametrize(
    ("code", "outcome"),
    [(b"import os\nos._exit(0)\n", "no_report"), (b"raise ImportError\n", "unresolved")],
    ids=["leaves at import", "breaks at import"],
)
async def test_code_that_ends_the_run_by_itself_resolves_nothing(bench, code, outcome):
    grade = await bench.grade(bench.diff({"calc.py": FIXED + code}))
    assert grade.outcome == outcome
    if outcome == "no_report":
        assert (grade.exit_code, grade.evidence) == (0, "none")
        assert "no report" in grade.error_text


async def test_an_endless_loop_is_a_timeout_and_nothing_of_it_lives_on(bench):
    loop = b"import subprocess\nsubprocess.Popen(['setsid', 'sleep', '987'])\nwhile True:\n    pass\n"
    grade = await bench.grade(bench.diff({"calc.py": FIXED + loop}), timeout_s=2)
    assert (grade.outcome, grade.exit_code) == ("tests_timeout", None)
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")]
    assert not any(b"sleep\x00987" in command for command in commands)


async def test_a_report_rewritten_at_exit_is_a_known_hole_and_carries_flags(bench):
    code = b"""
import atexit, glob, os, re
def forge():
    for path in glob.glob('/tmp/*/junit.xml'):
        text = re.sub(r'<failure.*?</failure>', '', open(path).read(), flags=re.S).replace('failures="1"', 'failures="0"')
        open(path, 'w').write(text)
    os._exit(0)
atexit.register(forge)
"""
    grade = await bench.grade(bench.diff({"calc.py": CALC + code}))
    assert grade.outcome == "resolved"  # documented: code under test shares the process with the reporter
    assert {"adds:atexit", "adds:os._exit", "adds:junit"} <= set(grade.flags)


async def test_a_report_that_only_loses_its_failure_is_caught_by_the_exit_code_and_the_counters(bench):
    code = b"""
import atexit, glob, re
def forge():
    for path in glob.glob('/tmp/*/junit.xml'):
        text = re.sub(r'<failure.*?</failure>', '', open(path).read(), flags=re.S)
        open(path, 'w').write(text)
atexit.register(forge)
"""
    grade = await bench.grade(bench.diff({"calc.py": CALC + code}))
    assert grade.outcome == "unresolved"
    assert "junit_counters_disagree" in grade.flags


async def test_a_script_cannot_be_read_by_the_code_it_tests(bench):
    spy = b"import glob, subprocess\nfor f in glob.glob('/tmp/**', recursive=True) + glob.glob('/private/**'): print('SEES', f)\n"
    script = SCRIPT.format(before="cd /testbed; : the-hidden-part", test=PYTEST)
    patch = bench.diff({"calc.py": FIXED + spy})
    grade = await bench.grade(patch, strict=False, targets=(), eval_script=script)
    assert grade.outcome == "resolved"
    assert b"/script" not in grade.log
    assert b"SEES /private" not in grade.log


async def test_an_allowed_conftest_runs_and_any_other_does_not(bench):
    conftest = b"import pytest\n@pytest.fixture\ndef four(): return 4\n"
    hidden = bench.diff({
        "tests/conftest.py": conftest,
        "tests/test_calc.py": bench.base["tests/test_calc.py"] + b"\n\ndef test_add(four):\n    assert calc.add(2, 2) == four\n",
    })  # fmt: skip
    evil = TAMPERING["conftest that turns failures into passes"]["conftest.py"]
    cheat = {"tests/conftest.py": evil, "tests/sub/conftest.py": evil, "conftest.py": evil}
    changes = {"allow_conftest": ("tests/conftest.py",), "test_patch": hidden, "pass_to_pass": P2P[:1]}
    assert (await bench.grade(bench.diff(cheat), **changes)).outcome == "unresolved"
    assert (await bench.grade(bench.diff(cheat | FIX), **changes)).outcome == "resolved"
