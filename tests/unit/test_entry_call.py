from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator import errors, settings
from orchestrator.entry import Call
from orchestrator.entry import request as module
from orchestrator.entry.call import DEFAULT_CONFIGS
from orchestrator.entry.episode import _write_all, folder_name
from orchestrator.entry.request import settings_of
from store.engine import parse_url
from store.errors import StoreUnusable

if TYPE_CHECKING:
    from pathlib import Path

URL = "http://127.0.0.1:1"


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_said", set())
    for name in ("LLM_MODEL", "OPENAI_BASE_URL", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def call(**changed: Any) -> Call:
    given: dict[str, Any] = {
        "agent_type": "swe", "config": "train", "result_dir": "logs", "api_key": "own", "base_url": URL,
    }  # fmt: skip
    return Call(**(given | changed))


def test_a_key_is_never_part_of_what_a_call_looks_like():
    assert "secret-key" not in repr(call(api_key="secret-key"))


@pytest.mark.parametrize("agent_type", ["cc", "oh", "opencode", "codex"])
def test_a_configuration_of_another_kind_gives_way_to_the_kinds_own_with_a_warning(
    agent_type: str, caplog: pytest.LogCaptureFixture
):
    chosen = settings_of(call(agent_type=agent_type, config="1_0_0/min-swe-agent-train-top1"), {})
    assert chosen.agent.type == agent_type
    used = DEFAULT_CONFIGS[agent_type]
    assert f"{used} is used instead" in caplog.text
    assert chosen == settings_of(call(agent_type=agent_type, config=used), {})
    assert caplog.text.count("used instead") == 1


def test_every_kind_of_agent_has_a_configuration_of_its_own():
    for agent_type, config in DEFAULT_CONFIGS.items():
        assert settings.agent_type_of(config) == agent_type
        assert settings_of(call(agent_type=agent_type, config=config), {}).agent.type == agent_type


def test_an_unknown_agent_names_the_known_ones():
    with pytest.raises(errors.ConfigError) as refused:
        settings_of(call(agent_type="nobody"), {})
    assert "swe, cc, oh, opencode, codex" in refused.value.hint


def test_the_provider_is_the_one_of_the_agent():
    given = {"opencode_provider": "a", "codex_provider": "b"}
    assert settings_of(call(agent_type="opencode", config="eval_opencode", **given), {}).agent.provider == "a"
    assert settings_of(call(agent_type="codex", config="eval_codex", **given), {}).agent.provider == "b"
    assert settings_of(call(**given), {}).agent.provider is None


def test_the_records_econfig_changes_settings_and_stays_as_it_is():
    record = {"econfig": {"step_limit": 3, "timeout": 1000, "agent_type": "swe", "agent_root": "/x"}}
    before = copy.deepcopy(record)
    chosen = settings_of(call(), record)
    assert chosen.agent.step_limit == 3
    assert record == before


@pytest.mark.parametrize(
    ("outer", "deadline"),
    [(100_000, 3500.0), (3600, 3500.0), (3000, 2940.0), (1800, 1746.0), (20, 19.0)],
)
def test_the_deadline_lies_inside_the_callers_timeout_and_leaves_the_agent_time(
    outer: float, deadline: float
):
    limits = settings_of(call(timeout_s=outer), {}).limits
    assert limits.deadline_s == deadline < outer
    assert limits.grade_s + limits.release_s <= deadline * 0.54


def test_the_calls_timeout_beats_the_records():
    assert settings_of(call(timeout_s=100), {"econfig": {"timeout": 2000}}).limits.deadline_s == 97
    assert settings_of(call(), {"econfig": {"timeout": 2000}}).limits.deadline_s == 1940


@pytest.mark.parametrize("outer", ["soon", -1, 0.5, True])
def test_a_timeout_that_leaves_no_time_is_refused(outer: object):
    with pytest.raises(errors.ConfigError, match="timeout"):
        settings_of(call(), {"econfig": {"timeout": outer}})


def test_a_deadline_that_leaves_the_agent_no_time_is_refused():
    with pytest.raises(errors.ConfigError, match="leaves the agent no time"):
        settings.load("train", arguments={"limits.deadline_s": 900})


def test_an_identity_is_the_hash_of_a_key_of_its_own_or_of_a_rollout_key():
    own = module.identity(call(api_key="own"), {})
    assert own == module.identity(call(api_key="own"), {"x": 1})
    assert own != module.identity(call(api_key="other"), {})
    assert module.identity(call(api_key="EMPTY"), {}) is None
    keyed = module.identity(call(api_key="EMPTY", rollout_key="a"), {})
    assert keyed == module.identity(call(api_key="EMPTY"), {"rollout_key": "a"})
    assert module.identity(call(api_key="own"), {"rollout_key": "a"}) == own, "siblings share the record"
    assert keyed != module.identity(call(api_key="a"), {}), "a rollout key is no API key"
    assert "own" not in str(own)


@pytest.mark.parametrize(
    ("instance_id", "name"),
    [("a__b-1", "a__b-1"), ("../../etc/passwd", "_.._etc_passwd"), ("..", "_"), ("", "_"), ("ä/ö", "_"), ("x" * 400, "x" * 150)],
)  # fmt: skip
def test_an_instance_id_makes_a_folder_name_whatever_it_holds(instance_id: str, name: str):
    assert folder_name(instance_id) == name


def test_files_of_one_rollout_may_be_written_by_many_calls_at_once(tmp_path: Path):
    files = {"patch.diff": b"x" * 100_000, "result.json": b"{}", "grade.log": None}
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: _write_all(tmp_path, files), range(40)))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        "patch.diff": b"x" * 100_000, "result.json": b"{}",
    }  # fmt: skip


@pytest.mark.parametrize(
    "url",
    ["postgresql://u:PW@SECRET@127.0.0.1:notaport/x", "mysql+x://u:SECRET@h:y/z"],
)  # fmt: skip
def test_a_text_that_is_no_url_is_refused_without_its_password(url: str):
    with pytest.raises(StoreUnusable) as refused:
        parse_url(url)
    assert "SECRET" not in str(refused.value) + refused.value.hint


def test_without_a_url_the_store_is_one_file_per_host_on_its_own_disk_and_says_what_to_set():
    url, why = settings.entry_database_url({"ROLLOUTS_DATABASE_URL": "postgresql://h/d", "LOG_DIR": "/l"})
    assert (url, why) == ("postgresql://h/d", "")
    url, why = settings.entry_database_url({"ROLLOUTS_LOCAL_DIR": "/scratch", "LOG_DIR": "/l"})
    assert url.startswith("sqlite:////scratch/rollouts-")
    assert "ROLLOUTS_DATABASE_URL" in why
    url, _ = settings.entry_database_url({"XDG_STATE_HOME": "/state"})
    assert url.startswith("sqlite:////state/areal-sweagent/rollouts-")
    url, _ = settings.entry_database_url({"HOME": "/home/me"})
    assert url.startswith("sqlite:////home/me/.local/state/areal-sweagent/rollouts-")


def test_clean_up_opens_the_store_of_the_calls_and_warns_where_log_dir_had_to_decide(tmp_path: Any):
    environ = {"ROLLOUTS_LOCAL_DIR": str(tmp_path), "LOG_DIR": "/elsewhere"}
    url, doubt = settings.maintenance_database_url(environ)
    assert url == "sqlite:////elsewhere/rollouts.db"
    assert str(tmp_path) in doubt
    own, _ = settings.entry_database_url(environ)
    (tmp_path / own.rpartition("/")[2]).touch()
    assert settings.maintenance_database_url(environ) == (own, "")
    named = {**environ, "ROLLOUTS_DATABASE_URL": "sqlite:////named.db"}
    assert settings.maintenance_database_url(named) == ("sqlite:////named.db", "")


def test_the_record_names_endpoint_and_key_where_the_call_does_not():
    record = {"override_base_url": "http://record:1", "override_api_key": "of-record"}
    assert settings_of(call(base_url=None), record).llm.base_url == "http://record:1"
    assert settings_of(call(), record).llm.base_url == URL
    assert module.key_of(call(api_key=""), record) == "of-record"
    assert module.key_of(call(), record) == "own"
    assert module.identity(call(api_key=""), record) == module.identity_of("of-record", {})


def test_what_areal_puts_into_unset_variables_is_no_endpoint(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_BASE_URL", "none")
    with pytest.raises(errors.ConfigError, match="no model endpoint"):
        settings_of(call(base_url=None), {})


def test_the_environment_names_a_provider_that_the_call_does_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CODEX_PROVIDER", "of-environment")
    codex = {"agent_type": "codex", "config": "eval_codex"}
    assert settings_of(call(**codex), {}).agent.provider == "of-environment"
    assert settings_of(call(**codex, codex_provider="own"), {}).agent.provider == "own"


def test_an_agent_without_a_program_is_refused_before_anything_is_made():
    module.refuse_absent_agent("swe")
    with pytest.raises(errors.ConfigError, match="not part of this version"):
        module.refuse_absent_agent("oh")


def test_an_econfig_may_be_json_and_anything_else_is_refused():
    assert settings_of(call(), {"econfig": '{"step_limit": 4}'}).agent.step_limit == 4
    assert (
        settings_of(call(), {"econfig": None})
        == settings_of(call(), {"econfig": ""})
        == settings_of(call(), {})
    )
    for odd in ("not json", "[1]", 7, [1]):
        with pytest.raises(errors.RecordRefused, match="econfig is no mapping"):
            settings_of(call(), {"econfig": odd})
