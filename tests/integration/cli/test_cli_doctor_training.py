"""`rollouts doctor --training`: what would leave every rollout of a trainer's worker without a reward, before it starts."""

from __future__ import annotations

import json
import socket
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from orchestrator.cli import doctor_training
from orchestrator.cli.doctor import Verdict
from store import engine, revisions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.integration.cli.conftest import Command

ROOT = Path(__file__).resolve().parents[3]
SECRET = "hunter2"
CLOSED = "http://127.0.0.1:9"
VARIABLES = (
    "ROLLOUTS_DATABASE_URL", "ROLLOUTS_LOCAL_DIR", "OPENAI_BASE_URL", "LLM_MODEL", "AWEAGENT_ROOT",
    "SWE_AGENT_ROOT", "SWEAGENT_ROOT", "PYTHONPATH",
)  # fmt: skip


@pytest.fixture
def command(command: Command, tmp_path: Path) -> Command:
    """The command in an empty folder, with a state directory of its own."""
    command.folder = tmp_path / "here"
    command.folder.mkdir()
    command.environ["XDG_STATE_HOME"] = str(tmp_path / "state")
    return command


@pytest.fixture
def variables() -> Iterator[pytest.MonkeyPatch]:
    """An environment that names nothing."""
    with pytest.MonkeyPatch.context() as patch:
        for name in VARIABLES:
            patch.delenv(name, raising=False)
        patch.setenv("PYTHONPATH", str(ROOT))
        yield patch


def checks(command: Command, *arguments: str, code: int = 0) -> dict[str, dict[str, str]]:
    """Return the findings by the name of their check."""
    ran = command("doctor", "--training", "--json", *arguments)
    assert ran.returncode == code, ran.stdout + ran.stderr
    return {found["check"]: found for found in map(json.loads, ran.stdout.splitlines())}


@pytest.mark.long
def test_a_worker_that_can_train_passes_and_has_its_database(command: Command, tmp_path: Path):
    command.environ["OPENAI_BASE_URL"] = "none"  # what AReaL's proxy sets
    found = checks(command)
    assert {name: f["verdict"] for name, f in found.items() if f["verdict"] == "fail"} == {}
    assert found["ROLLOUTS_DATABASE_URL"]["verdict"] == "warn"
    assert "ROLLOUTS_LOCAL_DIR" in found["ROLLOUTS_DATABASE_URL"]["todo"]
    file = tmp_path / "state" / "areal-sweagent" / f"rollouts-{socket.gethostname()}.db"
    assert found["store"]["found"] == f"{file} opens and takes writes"
    with closing(sqlite3.connect(file)) as connection:
        assert connection.execute("select stopping from workers").fetchall() == [(1,)]
    assert found["requirements"]["found"] == "13 of 13 are satisfied"
    assert found["entry"]["found"] == f"{ROOT}/aweagent/lifecycle.py can be imported"
    assert set(found) >= {"configurations", "agent", "isolation", "git"}
    assert not set(found) & {"database", "schema", "model endpoint", "AEnvironment"}
    assert [path.name for path in command.folder.iterdir() if not path.name.startswith(".said-")] == []


@pytest.mark.long
def test_what_every_rollout_would_stumble_over_is_named_and_fails(command: Command, tmp_path: Path):
    command.environ |= {
        "ROLLOUTS_DATABASE_URL": f"postgresql://me:{SECRET}@127.0.0.1:9/rollouts",
        "SWEAgent_AGENT_TYPE": " CC ",
        "SWEAgent_CONFIG": "trian",
        "AENV_SYSTEM_URL": "http://127.94.31.7",
    }
    found = checks(command, "--base-url", CLOSED, code=1)
    assert [name for name, f in found.items() if f["verdict"] == "fail"] == [
        "store", "configurations", "agent", "model endpoint", "AEnvironment",
    ]  # fmt: skip
    assert found["ROLLOUTS_DATABASE_URL"]["verdict"] == "ok"
    assert "did you mean 'train'" in found["configurations"]["found"]
    assert found["agent"]["found"].startswith("SWEAgent_AGENT_TYPE asks for cc,")
    assert SECRET not in str(found)
    assert not (tmp_path / "state").exists()


def test_a_database_on_the_command_line_is_refused_because_no_call_would_use_it(command: Command):
    ran = command("doctor", "--training", "--db", "a.db")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "ROLLOUTS_DATABASE_URL" in ran.stderr
    assert not (command.folder / "a.db").exists()


async def test_the_database_is_brought_forward_as_a_call_would_do(
    variables: pytest.MonkeyPatch, tmp_path: Path
):
    url = f"sqlite:///{tmp_path}/r.db"
    writing = engine.write_engine(engine.parse_url(url))
    with writing.begin() as connection:
        revisions.upgrade(connection, "0001")
    writing.dispose()
    variables.setenv("ROLLOUTS_DATABASE_URL", url)
    assert [found.verdict for found in await doctor_training._store()] == [Verdict.OK, Verdict.OK]
    with closing(sqlite3.connect(tmp_path / "r.db")) as raw:
        assert raw.execute("select version_num from alembic_version").fetchall() == [(revisions.newest(),)]


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://me:{SECRET}@127.0.0.1:9/rollouts?sslpassword={SECRET}",
        f"postgresql://me:{SECRET}@127.0.0.1:port/rollouts",
        f"mysql://me:{SECRET}@127.0.0.1/rollouts",
        f"sqlite:///r.db?key={SECRET}",
        "sqlite:////proc/nowhere/r.db",
    ],
    ids=["silent server", "no port", "other kind", "options", "folder that cannot be made"],
)
async def test_a_database_that_no_call_could_open_fails_and_its_secret_is_not_shown(
    variables: pytest.MonkeyPatch, url: str
):
    variables.setenv("ROLLOUTS_DATABASE_URL", url)
    _, store = await doctor_training._store()
    assert (store.check, store.verdict) == ("store", Verdict.FAIL)
    assert store.todo
    assert SECRET not in store.found + store.todo
    assert "--db" not in store.found + store.todo


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (["pytest>=1", "sqlalchemy[asyncio]>=2"], "2 of 2 are satisfied"),
        (["pytest", "no-such-package>=1"], "no-such-package is not installed"),
        (["pytest>=999"], ", not >=999"),
        (["pytest[no-such-extra]", "sqlalchemy[mssql]"], "pyodbc is not installed"),
    ],
    ids=["all there", "one missing", "one too old", "a part of an extra missing"],
)
def test_requirements_are_looked_up_with_their_extras(wanted: list[str], found: str):
    got = doctor_training._requirements(wanted)
    assert got.found.endswith(found)
    assert got.verdict is (Verdict.OK if "satisfied" in found else Verdict.FAIL)


def test_a_configuration_that_does_not_load_fails_but_no_endpoint_of_the_environment_does(
    variables: pytest.MonkeyPatch, tmp_path: Path
):
    variables.setenv("OPENAI_BASE_URL", f"http://me:{SECRET}@127.0.0.1/v1")
    assert doctor_training._configurations(["train"]).verdict is Verdict.OK
    broken = tmp_path / "mine.yaml"
    broken.write_text("extends: train\nlimits: {deadline_s: 900}\n")
    found = doctor_training._configurations(["train", str(broken)])
    assert found.verdict is Verdict.FAIL
    assert "leaves the agent no time" in found.found


def test_an_entry_that_cannot_be_imported_fails_with_the_last_word_of_the_interpreter(
    variables: pytest.MonkeyPatch, tmp_path: Path
):
    (tmp_path / "aweagent").mkdir()
    (tmp_path / "aweagent" / "__init__.py").touch()
    variables.setenv("PYTHONPATH", str(tmp_path))
    (found,) = doctor_training._entry()
    assert found.verdict is Verdict.FAIL
    assert found.found == "cannot be imported: ModuleNotFoundError: No module named 'aweagent.lifecycle'"


@pytest.mark.long
def test_another_checkout_that_areal_would_take_first_is_named(variables: pytest.MonkeyPatch, tmp_path: Path):
    package = tmp_path / "aweagent"
    package.mkdir()
    for name in ("__init__.py", "lifecycle.py", "runner.py"):
        (package / name).touch()
    variables.setenv("SWEAGENT_ROOT", str(tmp_path))
    (found,) = doctor_training._entry()
    assert (found.check, found.verdict) == ("entry", Verdict.WARN)
    assert str(package / "lifecycle.py") in found.found


def test_a_root_that_is_no_folder_is_named_and_the_import_path_decides(
    variables: pytest.MonkeyPatch, tmp_path: Path
):
    variables.setenv("AWEAGENT_ROOT", str(tmp_path / "gone"))
    checkout, entry = doctor_training._entry()
    assert (checkout.check, checkout.verdict) == ("checkout", Verdict.WARN)
    assert entry.verdict is Verdict.OK
