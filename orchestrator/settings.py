"""Every setting, built once from defaults, YAML, environment, record and call arguments, then passed down frozen.

The only reader of `os.environ`. Precedence, strongest first: call arguments, the record's `econfig`, environment,
YAML (`aweagent/configs/NAME.yaml`, with `extends:`), defaults.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self
from urllib.parse import unquote, urlsplit

import yaml
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, model_validator

from orchestrator import errors

if TYPE_CHECKING:
    from collections.abc import Mapping

CONFIG_DIR = Path(__file__).resolve().parent.parent / "aweagent" / "configs"

AgentType = Literal["swe", "cc", "oh", "opencode", "codex"]
ToolName = Literal["bash", "search_replace", "view", "create", "submit"]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class AgentSettings(_Section):
    """How the agent works. Token numbers are tokens, times seconds."""

    type: AgentType = "swe"
    provider: str | None = None
    """Name of the model provider in the configuration of opencode or codex."""
    step_limit: int = Field(default=100, ge=1)
    """Model turns."""
    max_completion_tokens: int = Field(default=16384, ge=1)
    """Asked of the endpoint for each turn."""
    token_limit: int | None = Field(default=None, ge=1)
    """Prompt and completion tokens of the last turn together; beyond it the run ends."""
    timeout_s: float = Field(default=1800.0, gt=0)
    """Wall time of the whole agent run."""
    command_timeout_s: float = Field(default=60.0, gt=0)
    max_command_timeout_s: float = Field(default=600.0, gt=0)
    """The most that a tool call may ask for."""
    max_command_timeouts: int = Field(default=3, ge=1)
    """So many commands over time in a row end the run."""
    max_format_errors: int = Field(default=3, ge=1)
    """So many unusable turns in a row end the run."""
    observation_limit: int = Field(default=10_000, ge=100)
    """Characters of tool output shown to the model: half from the head, half from the tail."""
    tools: tuple[ToolName, ...] = ("bash", "search_replace")
    temperature: float | None = None
    top_p: float | None = None
    system_prompt: str = "You are a software engineer. Solve the task with the tools you are given."
    instance_prompt: str = "Work in {workdir}.\n\n{problem_statement}"
    """Placeholders: {workdir}, {problem_statement}, {instance_id}."""


class LlmSettings(_Section):
    """How the endpoint is called. No request is repeated once it may have been sampled."""

    base_url: str | None = None
    model: str = ""
    api_key_env: str = "OPENAI_API_KEY"
    """Name of the variable that holds the key; the name is stored, the key never is."""
    request_timeout_s: float = Field(default=600.0, gt=0)
    connect_retries: int = Field(default=5, ge=0)
    """Repeats of a request that was refused before it can have been sampled."""
    retry_base_s: float = Field(default=1.0, ge=0)
    retry_cap_s: float = Field(default=30.0, ge=0)


class SandboxSettings(_Section):
    """Where and how sandboxes are made."""

    provider: Literal["local"] = "local"
    root: Path | None = None
    """Folder of local workspaces; default: the platform's temporary directory."""
    python: Path | None = None
    """Interpreter (of a virtual environment with pytest) for local sandboxes; default: one kept in the cache."""
    read_only_paths: tuple[Path, ...] = ()
    """More paths of this machine that local sandboxes may read."""
    allow_no_isolation: bool = False
    isolation: Literal["auto", "bwrap", "unshare", "none"] = "auto"
    create_timeout_s: float = Field(default=600.0, gt=0)
    memory_mb: int | None = Field(default=4096, ge=64)
    processes: int | None = Field(default=512, ge=16)
    file_mb: int | None = Field(default=1024, ge=1)


class GradingSettings(_Section):
    """How patches are taken and graded."""

    timeout_s: float | None = Field(default=None, gt=0)
    """Of the test command; default: the record's `timeout_s`."""
    patch_limit_bytes: int = Field(default=5_000_000, ge=1)
    extract_timeout_s: float = Field(default=300.0, gt=0)
    log_limit_bytes: int = Field(default=10_000_000, ge=1000)


class RetrySettings(_Section):
    """Pause before a new attempt: `base_s * 2**n`, capped, with jitter."""

    backoff_base_s: float = Field(default=2.0, ge=0)
    backoff_cap_s: float = Field(default=300.0, ge=0)


class LimitSettings(_Section):
    """The time a caller gives: it must end inside the caller's own limit, so that what was reached is not lost."""

    deadline_s: float | None = Field(default=None, gt=0)
    """From submission to the answer; without one only the limits of the parts count."""
    grade_s: float = Field(default=900.0, gt=0)
    """Of the deadline, kept for taking and grading the patch: the agent ends before it."""
    release_s: float = Field(default=30.0, gt=0)
    """Of the deadline, kept for giving the sandbox back: grading ends before it."""
    on_timeout: Literal["grade", "zero", "drop"] = "grade"
    """What an agent that ran out of time is worth: its patch's grade, 0.0, or nothing (the sample is dropped)."""

    @model_validator(mode="after")
    def _leaves_time(self) -> Self:
        if self.deadline_s is not None and self.deadline_s <= self.grade_s + self.release_s:
            raise ValueError(
                f"deadline_s {self.deadline_s:g} leaves the agent no time beside grade_s {self.grade_s:g} and"
                f" release_s {self.release_s:g}"
            )
        return self


class TrainingSettings(_Section):
    """How a process behaves that a trainer calls."""

    on_systemic: Literal["drop", "exit"] = "drop"
    """When something is wrong that hits every rollout: go on answering "no reward", or end the process (code 78)."""
    exit_after_s: float = Field(default=900.0, gt=0)
    """So long without one valid rollout, while some were asked for, ends the process with `exit`."""
    episode_logs: bool = True
    """Write `LOG_DIR/<instance>/<rollout>/` for people, from what is stored."""


class Settings(_Section):
    """All effective settings of a rollout; holds no secret, so all of it is stored."""

    agent: AgentSettings = AgentSettings()
    llm: LlmSettings = LlmSettings()
    sandbox: SandboxSettings = SandboxSettings()
    grading: GradingSettings = GradingSettings()
    retry: RetrySettings = RetrySettings()
    limits: LimitSettings = LimitSettings()
    training: TrainingSettings = TrainingSettings()

    def to_json(self) -> str:
        """Return the canonical JSON that is stored and hashed."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))

    @property
    def sha256(self) -> str:
        """Digest of every effective setting."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


ENVIRONMENT: Mapping[str, tuple[str, str]] = {
    "LLM_MODEL": ("llm", "model"),
    "OPENAI_BASE_URL": ("llm", "base_url"),
}
"""Environment variable -> the setting it gives."""

ECONFIG: Mapping[str, tuple[str, str]] = {
    "agent_type": ("agent", "type"),
    "step_limit": ("agent", "step_limit"),
    "max_completion_tokens": ("agent", "max_completion_tokens"),
    "llm_model": ("llm", "model"),
}
"""Key of AReaL's `econfig` -> the setting it gives; every other key of an `econfig` is AReaL's own."""


def load(
    config: str,
    *,
    arguments: Mapping[str, Any] | None = None,
    econfig: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """Build the effective settings.

    `config` is a name below `aweagent/configs/` or a path to a YAML file; `arguments` are `section.key` -> value (None
    means not given); `environ` defaults to the process's. Raises `errors.ConfigError`, which names the nearest known
    key for an unknown one.
    """
    tree = _read_yaml(config, seen=())
    variables = os.environ if environ is None else environ
    for name, (section, key) in ENVIRONMENT.items():
        if variables.get(name):
            _section(tree, section, name)[key] = variables[name]
    for name, (section, key) in ECONFIG.items():
        if econfig is not None and econfig.get(name) not in (None, ""):
            _section(tree, section, name)[key] = econfig[name]
    for path, value in (arguments or {}).items():
        if value is not None:
            section, _, key = path.partition(".")
            _section(tree, section, path)[key] = value
    try:
        loaded = Settings.model_validate(tree)
    except ValidationError as e:
        raise errors.ConfigError(
            f"config {config!r}: {_explain(e)}", hint="see `aweagent/configs/`"
        ) from None
    _refuse_secrets(loaded.llm)
    return loaded


_SECRET_FIELD = re.compile(
    r"(?:^|[&;?])[^=&;]*(?:key|token|secret|pass|pwd|auth|sig|cred)[^=&;]*=", re.IGNORECASE
)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_KEY_HINT = "put the key into an environment variable and name that with --api-key-env (llm.api_key_env)"


def _refuse_secrets(llm: LlmSettings) -> None:
    """Refuse settings that hold a key, because settings are stored; no message here repeats the value."""
    if not _VARIABLE.fullmatch(llm.api_key_env):
        raise errors.ConfigError(
            "llm.api_key_env is not the name of an environment variable; a key itself does not belong there",
            hint=_KEY_HINT,
        )
    url = llm.base_url or ""
    if url.startswith("replay:"):
        return
    if "@" in url:
        raise errors.ConfigError(
            "llm.base_url holds a user name or password (something before an @), which would be stored",
            hint=f"{_KEY_HINT}; an @ of the path is written %40",
        )
    unusable = errors.ConfigError(
        "llm.base_url is no URL that can be called: its host or port cannot be read",
        hint="give a base URL such as http://127.0.0.1:8000/v1",
    )
    try:
        parts = urlsplit(url)
        if parts.port == 0:
            raise unusable
    except ValueError:
        raise unusable from None
    if any(_SECRET_FIELD.search(unquote(part)) for part in (parts.query, parts.fragment)):
        raise errors.ConfigError(
            "llm.base_url holds what looks like a key in its query, which would be stored", hint=_KEY_HINT
        )


def agent_type_of(config: str) -> str:
    """Return the kind of agent that a configuration is for; raises `errors.ConfigError` when there is none."""
    return str(_section(_read_yaml(config, seen=()), "agent", config).get("type", AgentSettings().type))


def config_names() -> list[str]:
    """Return the names of the configurations that ship with the program."""
    return sorted(str(p.relative_to(CONFIG_DIR).with_suffix("")) for p in CONFIG_DIR.rglob("*.yaml"))


def _read_yaml(config: str, seen: tuple[str, ...]) -> dict[str, Any]:
    if config in seen:
        raise errors.ConfigError(f"config {config!r} extends itself through {' -> '.join(seen)}")
    path = CONFIG_DIR / f"{config}.yaml"
    if not path.is_file():
        path = Path(config)
    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        near = difflib.get_close_matches(config, config_names(), n=1)
        meant = f"did you mean {near[0]!r}? " if near else ""
        raise errors.ConfigError(
            f"no config {config!r}", hint=f"{meant}there are: {', '.join(config_names())}"
        )
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as e:
        raise errors.ConfigError(f"config {path} cannot be read: {e}") from e
    if not isinstance(tree, dict) or not all(isinstance(v, dict) for k, v in tree.items() if k != "extends"):
        raise errors.ConfigError(f"config {path} must be a mapping of sections, each a mapping of settings")
    parent = tree.pop("extends", None)
    if parent is None:
        return tree
    merged = _read_yaml(str(parent), (*seen, config))
    for section, values in tree.items():
        merged[section] = {**merged.get(section, {}), **values}
    return merged


def _section(tree: dict[str, Any], section: str, origin: str) -> dict[str, Any]:
    if section not in Settings.model_fields:
        raise errors.ConfigError(
            f"{origin}: there is no section {section!r}", hint=_nearest(section, Settings)
        )
    found: dict[str, Any] = tree.setdefault(section, {})
    return found


def _explain(error: ValidationError) -> str:
    lines = []
    for problem in error.errors():
        path = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            lines.append(
                f"unknown key {path!r}; {_nearest(str(problem['loc'][-1]), _model_at(problem['loc'][:-1]))}"
            )
        else:
            lines.append(f"{path}: {problem['msg']}")
    return "; ".join(lines)


def _model_at(path: tuple[int | str, ...]) -> type[BaseModel]:
    model: type[BaseModel] = Settings
    for part in path:
        annotation = model.model_fields[str(part)].annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            model = annotation
    return model


def _nearest(key: str, model: type[BaseModel]) -> str:
    near = difflib.get_close_matches(key, list(model.model_fields), n=1, cutoff=0.4)
    return f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(model.model_fields)}"


def cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Return this program's folder in the platform's cache directory; it may not exist yet."""
    variables = os.environ if environ is None else environ
    base = variables.get("XDG_CACHE_HOME") or str(Path(variables.get("HOME") or "~").expanduser() / ".cache")
    return Path(base) / "areal-sweagent"


def database_url(argument: str | None, environ: Mapping[str, str] | None = None) -> str:
    """Return the store's URL: argument, then `ROLLOUTS_DATABASE_URL`, then `$LOG_DIR/rollouts.db` (`./logs`)."""
    variables = os.environ if environ is None else environ
    chosen = argument or variables.get("ROLLOUTS_DATABASE_URL")
    return chosen or f"sqlite:///{Path(variables.get('LOG_DIR') or 'logs') / 'rollouts.db'}"


def entry_database_url(environ: Mapping[str, str] | None = None) -> tuple[str, str]:
    """Return the store's URL for a trainer's calls, and, where nobody named one, what to do about it.

    Without `ROLLOUTS_DATABASE_URL` it is one file per host in node-local storage: `ROLLOUTS_LOCAL_DIR`, else the platform's
    state directory; `LOG_DIR` differs from process to process there, and is often on a network file system.
    """
    variables = os.environ if environ is None else environ
    if variables.get("ROLLOUTS_DATABASE_URL"):
        return variables["ROLLOUTS_DATABASE_URL"], ""
    named = variables.get("ROLLOUTS_LOCAL_DIR")
    home = Path(variables.get("HOME") or "~").expanduser()
    base = Path(
        named or Path(variables.get("XDG_STATE_HOME") or home / ".local" / "state") / "areal-sweagent"
    )
    url = f"sqlite:///{base.absolute() / f'rollouts-{socket.gethostname()}.db'}"
    return url, (
        "set ROLLOUTS_DATABASE_URL to a PostgreSQL database when there are several hosts, or ROLLOUTS_LOCAL_DIR to another"
        " folder on a disk of this host"
    )


def maintenance_database_url(environ: Mapping[str, str] | None = None) -> tuple[str, str]:
    """Return the URL that clean-up after a training job opens, and a warning where that is a guess.

    It is the one of the job's calls on this host; where there is no such file, `LOG_DIR` decides.
    """
    variables = os.environ if environ is None else environ
    url, guessed = entry_database_url(variables)
    if not guessed or Path(url.removeprefix("sqlite:///")).exists():
        return url, ""
    other = database_url(None, variables)
    return other, (
        f"ROLLOUTS_DATABASE_URL is not set and {url} does not exist, so LOG_DIR decided; where the job's workers ran with"
        " another LOG_DIR or on another host, this is not their database: set ROLLOUTS_DATABASE_URL for both"
    )


def secret(name: str, environ: Mapping[str, str] | None = None) -> SecretStr:
    """Return the API key that the variable `name` holds; endpoints that want none get a placeholder."""
    variables = os.environ if environ is None else environ
    return SecretStr(variables.get(name) or "EMPTY")


def variable(name: str, default: str = "", environ: Mapping[str, str] | None = None) -> str:
    """Return an environment variable, `default` where it is unset or empty."""
    variables = os.environ if environ is None else environ
    return variables.get(name) or default
