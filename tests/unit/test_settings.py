from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from orchestrator import errors, settings

if TYPE_CHECKING:
    from pathlib import Path

EMPTY: dict[str, str] = {}


def test_an_argument_beats_econfig_beats_environment_beats_yaml_beats_the_default(tmp_path: Path):
    path = tmp_path / "mine.yaml"
    path.write_text("agent: {step_limit: 5, timeout_s: 5, max_completion_tokens: 5}\nllm: {model: yaml}\n")
    built = settings.load(
        str(path),
        arguments={"agent.step_limit": 9},
        econfig={"step_limit": 7, "max_completion_tokens": 7, "llm_model": "econfig"},
        environ={"LLM_MODEL": "environment", "OPENAI_BASE_URL": "http://127.0.0.1:1/v1"},
    )
    assert built.agent.step_limit == 9
    assert (built.agent.max_completion_tokens, built.agent.timeout_s) == (7, 5)
    assert built.agent.temperature is None
    assert built.agent.max_format_errors == settings.AgentSettings().max_format_errors
    assert built.llm.model == "econfig"
    assert built.llm.base_url == "http://127.0.0.1:1/v1"


def test_an_unknown_key_names_the_nearest_known_one(tmp_path: Path):
    path = tmp_path / "typo.yaml"
    path.write_text("agent: {step_limt: 5}\n")
    with pytest.raises(errors.ConfigError, match=r"step_limt.*did you mean 'step_limit'"):
        settings.load(str(path), environ=EMPTY)


def test_an_unknown_section_names_the_nearest_known_one():
    with pytest.raises(errors.ConfigError) as refused:
        settings.load("train", arguments={"agnt.step_limit": 1}, environ=EMPTY)
    assert "did you mean 'agent'" in refused.value.hint


def test_an_unknown_config_names_the_nearest_and_all_that_exist():
    with pytest.raises(errors.ConfigError) as refused:
        settings.load("trian", environ=EMPTY)
    assert "did you mean 'train'" in refused.value.hint


def test_a_bad_value_is_refused_with_its_path():
    with pytest.raises(errors.ConfigError, match=r"agent\.step_limit"):
        settings.load("train", arguments={"agent.step_limit": "many"}, environ=EMPTY)


def test_a_config_extends_another_section_by_section(tmp_path: Path):
    (tmp_path / "base.yaml").write_text("agent: {step_limit: 5, timeout_s: 50}\n")
    child = tmp_path / "child.yaml"
    child.write_text(f"extends: {tmp_path / 'base.yaml'}\nagent: {{step_limit: 6}}\n")
    built = settings.load(str(child), environ=EMPTY)
    assert (built.agent.step_limit, built.agent.timeout_s) == (6, 50)


def test_a_config_that_extends_itself_is_refused(tmp_path: Path):
    path = tmp_path / "loop.yaml"
    path.write_text(f"extends: {path}\n")
    with pytest.raises(errors.ConfigError, match="extends itself"):
        settings.load(str(path), environ=EMPTY)


@pytest.mark.parametrize("text", ["- a\n- b\n", "agent: 5\n", "agent: {step_limit: [\n"])
def test_a_config_that_is_not_a_mapping_of_sections_is_refused(tmp_path: Path, text: str):
    path = tmp_path / "odd.yaml"
    path.write_text(text)
    with pytest.raises(errors.ConfigError, match=r"odd\.yaml"):
        settings.load(str(path), environ=EMPTY)


@pytest.mark.parametrize("name", settings.config_names())
def test_every_shipped_config_loads(name: str):
    assert settings.load(name, environ=EMPTY).agent.step_limit >= 1


def test_the_digest_follows_every_effective_setting():
    one = settings.load("train", environ=EMPTY)
    two = settings.load("train", arguments={"agent.step_limit": 99}, environ=EMPTY)
    assert one.sha256 == settings.load("train", environ=EMPTY).sha256 != two.sha256


def test_the_database_url_follows_argument_then_variable_then_log_dir():
    variables = {"ROLLOUTS_DATABASE_URL": "sqlite:///v.db", "LOG_DIR": "/tmp/l"}
    assert settings.database_url("sqlite:///a.db", variables) == "sqlite:///a.db"
    assert settings.database_url(None, variables) == "sqlite:///v.db"
    assert settings.database_url(None, {"LOG_DIR": "/tmp/l"}) == "sqlite:////tmp/l/rollouts.db"
    assert settings.database_url(None, EMPTY) == "sqlite:///logs/rollouts.db"


def test_a_key_never_shows_in_its_repr():
    assert "sk-planted" not in repr(settings.secret("K", {"K": "sk-planted"}))


SECRETS = [
    "http://user:s3cr3t-planted@host:8000/v1",
    "http://s3cr3t-planted@host/v1",
    "user:s3cr3t-planted@host/v1",
    "http://user:s3cr3t-planted/x@host/v1",
    "http://user:s3cr3t-planted#x@host/v1",
    "http://host/v1?api_key=s3cr3t-planted",
    "http://host/v1?v=1&access%5Ftoken=s3cr3t-planted",
    "http://host/v1;x?v=1;Token=s3cr3t-planted",
    "http://host/v1#key=s3cr3t-planted",
]


@pytest.mark.parametrize("way", ["argument", "environment", "yaml"])
@pytest.mark.parametrize("url", SECRETS)
def test_an_address_that_holds_a_key_is_refused_without_repeating_it(tmp_path: Path, url: str, way: str):
    path = tmp_path / "mine.yaml"
    path.write_text(f"llm: {{base_url: {url!r}}}\n" if way == "yaml" else "{}")
    with pytest.raises(errors.ConfigError) as refused:
        settings.load(
            str(path),
            arguments={"llm.base_url": url if way == "argument" else None},
            environ={"OPENAI_BASE_URL": url} if way == "environment" else EMPTY,
        )
    assert "s3cr3t" not in str(refused.value) + refused.value.hint
    assert "--api-key-env" in refused.value.hint


@pytest.mark.parametrize(
    "url", ["http://host:99999/v1", "http://host:s3cr3t/v1", "http://host:0/v1", "http://[::1/v1"]
)
def test_an_address_whose_port_or_host_cannot_be_read_is_refused(url: str):
    with pytest.raises(errors.ConfigError, match="cannot be read") as refused:
        settings.load("train", arguments={"llm.base_url": url}, environ=EMPTY)
    assert "s3cr3t" not in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:8000/v1",
        "https://[::1]:8000/v1?api-version=2026-01-01",
        "replay:a.yaml@0123456789ab",
    ],
)
def test_an_address_without_a_key_is_taken(url: str):
    assert settings.load("train", arguments={"llm.base_url": url}, environ=EMPTY).llm.base_url == url


def test_a_key_given_as_the_name_of_its_variable_is_refused_without_repeating_it():
    with pytest.raises(errors.ConfigError, match="name of an environment variable") as refused:
        settings.load("train", arguments={"llm.api_key_env": "sk-planted"}, environ=EMPTY)
    assert "planted" not in str(refused.value)
