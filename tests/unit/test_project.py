"""What several places say must be the same, and the layout must stay importable the way AReaL imports it."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from orchestrator import states
from orchestrator.cli.main import app
from store import schema

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
README = (ROOT / "README.md").read_text()
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for package in ("aweagent", "orchestrator", "store")
    for path in sorted((ROOT / package).rglob("*.py"))
    if path.name not in ("__init__.py", "__main__.py")
]


def test_requirements_are_the_core_dependencies_line_for_line():
    assert (ROOT / "requirements.txt").read_text().splitlines() == PROJECT["project"]["dependencies"]


@pytest.mark.parametrize("page", ["README.md", "docs/states.md"])
def test_pages_show_the_diagram_of_the_machine(page: str):
    assert f"```mermaid\n{states.diagram()}\n```" in (ROOT / page).read_text()


def test_the_readme_shows_the_state_line():
    line = [state.value for state in states.State if state is not states.State.FAILED]
    assert " -> ".join(line) in README


def test_the_readme_names_every_command():
    names = [command.name for command in app.registered_commands]
    names += [group.name for group in app.registered_groups]
    assert [name for name in names if f"| `rollouts {name}" not in README] == []


def test_the_first_screen_of_the_readme_has_something_to_run():
    screen = "\n".join(README.splitlines()[:50])
    for wanted in ("make demo", "make test", "rollouts sql", "AWEAGENT_ROOT"):
        assert wanted in screen


def test_each_step_module_is_named_after_a_state_that_is_not_terminal():
    found = {path.stem for path in (ROOT / "orchestrator" / "steps").glob("*.py")} - {"__init__"}
    assert found == {state.value for state in states.State} - {state.value for state in states.TERMINAL}


def test_the_store_knows_the_same_states_and_edges():
    assert schema.STATES == tuple(state.value for state in states.State)
    assert set(schema.TERMINAL) == {state.value for state in states.TERMINAL}
    text = "\n".join(path.read_text() for path in (ROOT / "migrations" / "versions").glob("*.py"))
    for (source, trigger), to in states.EDGES.items():
        assert f'("{source.value}", "{trigger}", "{to.value}")' in text


@pytest.mark.parametrize("folder", ["tests", "bench", "examples", "migrations"])
def test_folders_that_must_not_shadow_anybody_are_no_packages(folder: str):
    found = [path.relative_to(ROOT) for path in (ROOT / folder).rglob("__init__.py")]
    # The code of an example task lies below its own `repo` folder, where nobody looks for packages.
    assert [path for path in found if "repo" not in path.parts] == []


def test_importing_has_no_effects(tmp_path: Path):
    """In an empty folder, every module of ours: no file, no output, no thread, no environment change."""
    script = (
        "import importlib, os, sys, threading\n"
        "before = dict(os.environ)\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "assert dict(os.environ) == before\n"
        "assert threading.active_count() == 1\n"
    )
    wanted = [name for name in MODULES if name != "orchestrator.sandbox.unshare_init"]
    ran = subprocess.run(
        [sys.executable, "-B", "-c", script, *wanted],
        cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []


def test_areals_names_are_imported_without_any_package_of_ours_installed():
    script = "import aweagent, aweagent.lifecycle, aweagent.runner, aweagent.maintenance, sys; print('pydantic' in sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {script}"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert ran.stdout == "False\n"


def test_import_contracts_hold():
    command = Path(sys.executable).with_name("lint-imports")
    ran = subprocess.run([command, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout


def test_nothing_is_longer_than_a_page_can_bear():
    lengths = {
        path.relative_to(ROOT): len(path.read_text().splitlines())
        for package in ("aweagent", "orchestrator", "store", "migrations", "tests")
        for path in (ROOT / package).rglob("*.py")
    }
    assert {path: length for path, length in lengths.items() if length > 400} == {}


def test_example_links_and_files_that_the_readme_names_exist():
    named = re.findall(r"\]\(([^)#:]+)\)", README)
    assert [name for name in named if not (ROOT / name).exists()] == []
