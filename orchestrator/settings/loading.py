"""From YAML, environment, record and arguments to one frozen object, strongest last."""

from __future__ import annotations

import copy
import difflib
import os
import re
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit
from weakref import WeakValueDictionary

import yaml
from pydantic import BaseModel, ValidationError

from orchestrator import errors
from orchestrator.settings.sections import AgentSettings, LlmSettings, Settings

if TYPE_CHECKING:
    from collections.abc import Mapping

CONFIG_DIR = Path(__file__).resolve().parents[2] / "aweagent" / "configs"

_UNSET = "none"
"""What AReaL's proxy code puts into variables that nobody set."""
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
        if variables.get(name) and variables[name] != _UNSET:
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
    return _same(loaded)


def stored(tree: Mapping[str, Any]) -> Settings:
    """Return the settings that a rollout was stored with; raises `errors.ConfigError` when they do not fit."""
    try:
        return _same(Settings.model_validate(tree))
    except ValidationError as e:
        raise errors.ConfigError(f"settings: {_explain(e)}") from None


_in_use: WeakValueDictionary[str, Settings] = WeakValueDictionary()


def _same(loaded: Settings) -> Settings:
    """Return one object for equal settings: a worker's many rollouts would each keep dozens of objects alive otherwise."""
    return _in_use.setdefault(loaded.to_json(), loaded)


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
        status = path.stat()
        tree = copy.deepcopy(_parsed(path.absolute(), status.st_mtime_ns, status.st_size))
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


@lru_cache(maxsize=64)
def _parsed(path: Path, _changed_ns: int, _size: int) -> Any:  # noqa: ANN401 - whatever the file holds
    """Return a YAML file's content: parsed once, because a trainer's calls would hold up its event loop each time."""
    return yaml.safe_load(path.read_text(encoding="utf-8")) or {}


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
