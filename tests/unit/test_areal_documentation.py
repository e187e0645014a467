"""docs/areal.md says what the code does: names, numbers, queries and the script in it are tried out."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from packaging.requirements import Requirement

from orchestrator import settings
from orchestrator.entry import request

if TYPE_CHECKING:
    from tests.conftest import Database

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "areal.md").read_text()
NAMED = set(re.findall(r"`([^`\n]+)`", PAGE))
EMPTY: dict[str, str] = {}
LOCKED = {
    "openai": "2.33",
    "httpx": "0.28",
    "pydantic": "2.12",
    "sqlalchemy": "2.0.49",
    "alembic": "1.18",
    "anyio": "4.13",
    "rich": "13.9",
    "click": "8.1",
    "typer": "0.23",
}
"""What AReaL 2.0.0 locks (uv.lock of cbff54d6); none of it may have to change when our requirements are installed."""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def variables_read() -> set[str]:
    folders = (ROOT / "orchestrator" / "settings", ROOT / "aweagent")
    text = "".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))
    got = r'(?:\bvariable|\bsecret|\bgetenv|variables\.get|environ\.get)\(\s*"(\w+)"'
    found = set(re.findall(got, text)) | set(re.findall(r'(?:variables|environ)\[\s*"(\w+)"', text))
    providers = {variable for _, variable in request._PROVIDERS.values()}
    return found | providers | set(settings.ENVIRONMENT) | {settings.LlmSettings().api_key_env}


def test_the_page_names_every_variable_that_is_read():
    read = variables_read()
    assert {
        "ROLLOUTS_DATABASE_URL",
        "XDG_STATE_HOME",
        "SWEAgent_CONFIG",
        "LLM_MODEL",
        "CODEX_PROVIDER",
    } <= read
    assert read - NAMED == set()


def test_the_page_names_every_key_of_an_econfig_and_every_setting_of_a_trainer():
    assert set(settings.ECONFIG) - NAMED == set()
    for section in ("limits", "training"):
        keys = {f"{section}.{key}" for key in type(getattr(settings.Settings(), section)).model_fields}
        assert keys - NAMED == set()


def test_every_setting_that_the_page_names_exists():
    for section, key in re.findall(r"`(\w+)\.(\w+)`", PAGE):
        if section in settings.Settings.model_fields:
            assert key in type(getattr(settings.Settings(), section)).model_fields


def test_the_page_shows_each_shipped_configuration_with_its_numbers():
    shown: dict[str, tuple[str, ...]] = {}
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and cells[2].isdigit():
            names, agents = (re.findall(r"`([^`]+)`", cell) for cell in cells[:2])
            configs = [name for name in names if name in settings.config_names()]
            kinds = agents if len(agents) == len(configs) else agents * len(configs)
            shown |= {name: (kind, *cells[2:4]) for name, kind in zip(configs, kinds, strict=True)}
    expected: dict[str, tuple[str, ...]] = {}
    for name in settings.config_names():
        loaded = settings.load(name, environ=EMPTY)
        deadline_s = loaded.limits.deadline_s
        expected[name] = (
            loaded.agent.type,
            f"{loaded.agent.timeout_s:g}",
            "none" if deadline_s is None else f"{deadline_s:g}",
        )
    assert shown == expected


def test_the_yaml_to_paste_can_be_read_and_ends_its_start_up_with_the_doctor():
    pasted, own = (yaml.safe_load(block) for block in blocks("yaml"))
    (spec,) = pasted["actor"]["scheduling_spec"]
    assert set(spec["env_vars"]) >= {
        "PYTHONPATH", "AWEAGENT_ROOT", "SWE_AGENT_ROOT", "SWEAGENT_ROOT", "AENV_SYSTEM_URL", "SWEBENCH_EVAL_ENV",
        "REMOTE_PROXY_SERVICE_URL", "REMOTE_PROXY_API_KEY", "LOG_DIR", "ROLLOUTS_DATABASE_URL",
    }  # fmt: skip
    commands = spec["additional_bash_cmds"]
    for wanted in (
        "CURL_CA_BUNDLE=", "SSL_CERT_FILE=", "PIP_CERT=", "install --no-deps aenvironment", "install 'fastmcp<3' colorlog",
        "install -r $AWEAGENT_ROOT/requirements.txt", "'import aenv, aweagent'",
    ):  # fmt: skip
        assert wanted in "\n".join(commands[:-1])
    assert commands[-1].endswith("-m orchestrator doctor --training || exit 1")
    assert "aweagent.maintenance.clean_instances" in pasted["post_exit_hook"]
    assert set(settings.ECONFIG) <= set(pasted["econfig"])
    assert set(own) - {"extends"} <= set(settings.Settings.model_fields)


def test_the_doctor_stops_a_worker_although_areals_slurm_scheduler_joins_commands_with_semicolons():
    commands = yaml.safe_load(blocks("yaml")[0])["actor"]["scheduling_spec"][0]["additional_bash_cmds"]
    ill = re.sub(r".* doctor --training", "false", commands[-1])
    ran = subprocess.run(["bash", "-c", f"{ill};\necho started"], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (1, "")


def test_the_settings_of_its_example_load(tmp_path: Path):
    path = tmp_path / "own.yaml"
    path.write_text(blocks("yaml")[1])
    loaded = settings.load(str(path), environ=EMPTY)
    assert (loaded.limits.on_timeout, loaded.training.on_systemic) == ("drop", "exit")


@pytest.mark.databases("sqlite", "postgresql")
def test_every_query_of_the_page_can_be_asked(database: Database):
    queries = blocks("sql")
    assert len(queries) >= 4
    assert [database.ask(query) for query in queries] == [[] for _ in queries]


def test_the_script_of_the_page_joins_what_fits_once_and_never_guesses(tmp_path: Path):
    def handed(task: str, group: str, value: float, at: int = 1_000) -> dict[str, Any]:
        return {"task": task, "group_id": group, "value": value, "at": at}

    ours = [
        handed("0", "a/0", 1.0), handed("0", "a/0", 0.0), handed("0", "b/0", 1.0), handed("0", "b/0", 1.0),
        handed("1", "a/1", 1.0), handed("1", "b/1", 1.0),
        handed("2", "a/2", 1.0, at=9_000),
    ]  # fmt: skip
    (tmp_path / "ours.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ours))
    dump = tmp_path / "rollout" / "7"
    dump.mkdir(parents=True)
    dumped = {
        "0": [{"reward": 0.0}, {"reward": 0.3, "original_reward": 1.0}],
        "1": [{"reward": 1.0}],
        "2": [{"reward": 1.0}],
    }
    for task, lines in dumped.items():
        file = dump / f"{task}.jsonl"
        file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        os.utime(file, (5, 5))  # before what is at 9,000 ms
    (script,) = blocks("python")
    ran = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "rollout", tmp_path / "ours.jsonl"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert ran.stdout.splitlines() == ["7 0 a/0", "7 1 2 groups fit", "7 2 0 groups fit"]


def test_requirements_admit_what_areal_locks():
    wanted = [Requirement(line) for line in (ROOT / "requirements.txt").read_text().splitlines()]
    named = {requirement.name: requirement.specifier for requirement in wanted}
    assert set(LOCKED) - set(named) == {"anyio", "click"}, "these two come with others"
    refused = [
        name for name, version in LOCKED.items() if name in named and not named[name].contains(version)
    ]
    assert refused == []


@pytest.mark.parametrize("folder", ["docs", "scripts", "benchmark"])
def test_folders_that_areal_has_too_are_no_packages(folder: str):
    assert list((ROOT / folder).rglob("__init__.py")) == []


def test_the_readme_leads_to_the_page():
    assert "(docs/areal.md)" in (ROOT / "README.md").read_text()
