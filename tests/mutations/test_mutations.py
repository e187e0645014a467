"""Every mutation of the catalogue is applied to a copy of the program and must be noticed by the test it names."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutations.catalogue import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("store", "orchestrator", "migrations", "aweagent", "tests", "examples", "pyproject.toml")
LONG_S = 120


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the program, without what running it leaves behind."""
    for name in COPIED:
        source, target = ROOT / name, tmp_path / "copy" / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, target)
    return tmp_path / "copy"


def apply(mutation: Mutation, root: Path) -> None:
    path = root / mutation.file
    text = path.read_text(encoding="utf-8")
    found = text.count(mutation.old)
    assert found == 1, (
        f"{mutation.name}: its text is {found} times in {mutation.file}; bring the catalogue up to date"
    )
    path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")


def run(root: Path, *tests: str) -> subprocess.CompletedProcess[str]:
    """Run tests of the copy on the copy."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "pytest_asyncio.plugin", "-p", "pytest_timeout"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = kept | {
        "PYTHONPATH": str(root),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    return subprocess.run(
        [*command, *tests],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=False,
    )


def told(done: subprocess.CompletedProcess[str]) -> str:
    return f"exit code {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-2000:]}"


@pytest.mark.long
@pytest.mark.timeout(LONG_S + 10)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_a_mutation_is_noticed(mutation: Mutation, copy: Path):
    apply(mutation, copy)
    done = run(copy, mutation.killer)
    assert done.returncode == 1, f"{mutation.name} survived {mutation.killer}\n{told(done)}"
    assert re.search(r"^FAILED ", done.stdout, re.MULTILINE), f"{mutation.name}: no test failed\n{told(done)}"
    sys.stdout.write(f"{mutation.name:58s} {mutation.killer.rsplit('::', 1)[1]}\n")


@pytest.mark.long
@pytest.mark.timeout(LONG_S + 10)
def test_the_tests_named_pass_on_an_unchanged_copy_and_run_that_copy(copy: Path):
    (copy / "tests" / "test_place.py").write_text(
        "import orchestrator, store\nfrom pathlib import Path\n"
        "def test_place():\n"
        f"    assert all(Path(m.__file__).is_relative_to({str(copy)!r}) for m in (orchestrator, store))\n",
        encoding="utf-8",
    )
    done = run(copy, "tests/test_place.py", *dict.fromkeys(m.killer for m in MUTATIONS))
    assert done.returncode == 0, told(done)


def test_every_mutation_still_has_its_text(tmp_path: Path):
    for mutation in MUTATIONS:
        (tmp_path / mutation.file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / mutation.file, tmp_path / mutation.file)
        apply(mutation, tmp_path)
