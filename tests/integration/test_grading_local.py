from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from orchestrator import errors
from orchestrator.grading import pipeline, validate
from orchestrator.sandbox import repository
from orchestrator.sandbox.base import Role, SandboxSpec
from orchestrator.sandbox.local import LocalProvider
from orchestrator.settings import SandboxSettings
from orchestrator.tasks.record import DatasetKind, RepoSource, Task

if TYPE_CHECKING:
    from orchestrator.grading.base import Grade
    from orchestrator.sandbox.local_sandbox import LocalSandbox

BASE: dict[str, bytes] = {
    "calc.py": b"def add(a, b):\n    return a - b\n\n\ndef same(a):\n    return a\n",
    "tests/test_calc.py": b"import calc\n\n\ndef test_same():\n    assert calc.same(1) == 1\n",
    "setup.cfg": b"[metadata]\nname = calc\n\n[tool:pytest]\naddopts = -q -p no:hypothesispytest -p no:asyncio -p no:anyio -p no:timeout\n",
    ".gitignore": b"*.log\n",
}
FIX = {"calc.py": BASE["calc.py"].replace(b"a - b", b"a + b")}
HIDDEN = {
    "tests/test_calc.py": BASE["tests/test_calc.py"]
    + b"\n\ndef test_add():\n    assert calc.add(2, 2) == 4\n",
    "tests/test_new.py": b"import calc\n\n\ndef test_zero():\n    assert calc.add(0, 0) == 0\n",
}
F2P = ("tests/test_calc.py::test_add",)
P2P = ("tests/test_calc.py::test_same", "tests/test_new.py::test_zero")
SCRIPT = "#!/bin/bash\nexport PYTEST_DISABLE_PLUGIN_AUTOLOAD=1\nset -uxo pipefail\n{before}\n: '>>>>> Start Test Output'\n{test}\n: '>>>>> End Test Output'\ngit checkout -- tests\n"
PYTEST = "python3 -m pytest -rA -p no:cacheprovider tests"
ENV = {
    "PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/nonexistent", "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_AUTHOR_NAME": "t", "GIT_AUTHOR_EMAIL": "t@t", "GIT_COMMITTER_NAME": "t", "GIT_COMMITTER_EMAIL": "t@t",
}  # fmt: skip


def git(folder: Path, *arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=folder, env=ENV, check=True, capture_output=True).stdout


def fill(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


class Bench:
    """A task, patches made for it with plain git, and fresh sandboxes to grade them in."""

    def __init__(self, folder: Path, provider: LocalProvider) -> None:
        self.folder = folder
        self.provider = provider
        self.sandboxes: list[LocalSandbox] = []
        self.count = 0
        tree = fill(folder / "tree", BASE)
        self.task = Task(
            instance_id="calc__calc-1",
            dataset_kind=DatasetKind.LOCAL,
            workdir="/testbed",
            problem_statement="2 + 2 is not 0",
            repo_source=RepoSource(kind="tree", path=tree),
            strict=True,
            targets=("tests",),
            test_patch=self.diff(HIDDEN),
            gold_patch=self.diff(FIX),
            fail_to_pass=F2P,
            pass_to_pass=P2P,
        )

    def diff(self, files: dict[str, bytes], *, remove: tuple[str, ...] = ()) -> bytes:
        self.count += 1
        clone = fill(self.folder / f"clone{self.count}", BASE)
        git(clone, "init", "-q")
        git(clone, "add", "-A", "-f")
        git(clone, "commit", "-qm", "base")
        for name in remove:
            (clone / name).unlink()
        fill(clone, files)
        git(clone, "add", "-A", "-f")
        return git(clone, "diff", "--cached", "--binary", "--full-index", "--no-renames", "HEAD")

    async def sandbox(self, task: Task) -> LocalSandbox:
        spec = SandboxSpec(key=f"g{len(self.sandboxes)}", role=Role.GRADING, task=task)
        self.sandboxes.append(await self.provider.create(spec))
        return self.sandboxes[-1]

    async def grade(
        self, patch: bytes, *, timeout_s: float = 30, log_limit: int = 1_000_000, **changes
    ) -> Grade:
        task = self.task.model_copy(update=changes)
        sandbox = await self.sandbox(task)
        return await pipeline.grade(task, patch, sandbox, timeout_s=timeout_s, log_limit=log_limit)

    def tree(self) -> Path:
        """The work tree of the last sandbox."""
        return Path(self.sandboxes[-1].provider_id) / "work"


@pytest.fixture(scope="module")
def provider(tmp_path_factory):
    folder = tmp_path_factory.mktemp("provider")
    settings = SandboxSettings(root=folder / "sandboxes", python=Path(sys.executable))
    return LocalProvider(settings, cache_dir=folder / "cache")


@pytest.fixture
async def bench(tmp_path, provider):
    opened = Bench(tmp_path, provider)
    yield opened
    for sandbox in opened.sandboxes:
        await sandbox.detach()
        await provider.release(sandbox.key)


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


async def test_a_test_patch_that_does_not_fit_the_base_is_the_tasks_failure(bench):
    grade = await bench.grade(
        bench.task.gold_patch, test_patch=bench.task.test_patch.replace(b"calc.same", b"calc.none")
    )
    assert grade.outcome == "test_patch_failed"


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
    "a forged line": {"calc.py": BASE["calc.py"] + b"print('\\nPASSED tests/test_calc.py::test_add')\n"},
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
    assert infra == patch.keys() - harmless
    assert {"test_file_restored:tests/test_calc.py", "test_file_restored:tests/test_new.py"} <= set(
        grade.flags
    )


async def test_a_folder_in_the_place_of_a_hidden_test_gives_way_to_it(bench):
    patch = bench.diff(FIX | TAMPERING["a folder where the hidden test belongs"])
    grade = await bench.grade(patch)
    assert (grade.outcome, grade.flags) == ("resolved", ["test_file_restored:tests/test_new.py/inner.txt"])


async def test_a_module_that_prints_a_graders_marker_is_still_resolved(bench):
    noisy = {"calc.py": FIX["calc.py"] + b"print('>>>>> Tests Errored')\n"}
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
    grade = await bench.grade(bench.diff({"calc.py": FIX["calc.py"] + code}))
    assert grade.outcome == outcome
    if outcome == "no_report":
        assert (grade.exit_code, grade.evidence) == (0, "none")
        assert "no report" in grade.error_text


async def test_an_endless_loop_is_a_timeout_and_nothing_of_it_lives_on(bench):
    loop = b"import subprocess\nsubprocess.Popen(['setsid', 'sleep', '987'])\nwhile True:\n    pass\n"
    grade = await bench.grade(bench.diff({"calc.py": FIX["calc.py"] + loop}), timeout_s=2)
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
    grade = await bench.grade(bench.diff({"calc.py": BASE["calc.py"] + code}))
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
    grade = await bench.grade(bench.diff({"calc.py": BASE["calc.py"] + code}))
    assert grade.outcome == "unresolved"
    assert "junit_counters_disagree" in grade.flags


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


async def test_a_script_cannot_be_read_by_the_code_it_tests(bench):
    spy = b"import glob, subprocess\nfor f in glob.glob('/tmp/**', recursive=True) + glob.glob('/private/**'): print('SEES', f)\n"
    script = SCRIPT.format(before="cd /testbed; : the-hidden-part", test=PYTEST)
    patch = bench.diff({"calc.py": FIX["calc.py"] + spy})
    grade = await bench.grade(patch, strict=False, targets=(), eval_script=script)
    assert grade.outcome == "resolved"
    assert b"/script" not in grade.log
    assert b"SEES /private" not in grade.log


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
        HIDDEN | {"tests/test_extra.py": b"import calc, extra\ndef test_it(): assert extra.value\n"}
    )
    grade = await bench.grade(
        patch,
        import_roots=(".", "my lib"),
        test_patch=hidden,
        fail_to_pass=(*F2P, "tests/test_extra.py::test_it"),
    )
    assert grade.outcome == "resolved", grade.log


async def test_an_allowed_conftest_runs_and_any_other_does_not(bench):
    conftest = b"import pytest\n@pytest.fixture\ndef four(): return 4\n"
    hidden = bench.diff({
        "tests/conftest.py": conftest,
        "tests/test_calc.py": BASE["tests/test_calc.py"] + b"\n\ndef test_add(four):\n    assert calc.add(2, 2) == four\n",
    })  # fmt: skip
    evil = TAMPERING["conftest that turns failures into passes"]["conftest.py"]
    cheat = {"tests/conftest.py": evil, "tests/sub/conftest.py": evil, "conftest.py": evil}
    changes = {"allow_conftest": ("tests/conftest.py",), "test_patch": hidden, "pass_to_pass": P2P[:1]}
    assert (await bench.grade(bench.diff(cheat), **changes)).outcome == "unresolved"
    assert (await bench.grade(bench.diff(cheat | FIX), **changes)).outcome == "resolved"


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
    git(bench.folder, "init", "-q")
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
