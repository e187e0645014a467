"""From a call to what is asked for: the task, the settings, the identity. Nothing is written to the record."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator import errors, settings
from orchestrator.agents import registry
from orchestrator.entry.call import DEFAULT_CONFIGS

if TYPE_CHECKING:
    from orchestrator.entry.call import Call
    from orchestrator.settings import Settings
    from orchestrator.tasks.record import Task

logger = logging.getLogger(__name__)

_PLACEHOLDERS = frozenset({"", "empty", "dummy", "none"})
"""Keys that many rollouts share, so that they say nothing about who calls."""
_CALL_KEYS = ("econfig", "override_api_key", "override_base_url", "rollout_key")
"""Keys of a record that belong to the call and not to the task; one of them is a secret."""
_PROVIDERS = {
    "opencode": ("opencode_provider", "OPENCODE_PROVIDER"),
    "codex": ("codex_provider", "CODEX_PROVIDER"),
}
"""Kind of agent -> the call's word for its provider, and the variable that holds it otherwise."""
_MARGIN, _LEAST_MARGIN_S, _MOST_MARGIN_S = 0.03, 1.0, 60.0
"""How far our deadline lies inside the caller's timeout: a share of it, within bounds in seconds."""
_said: set[str] = set()


def say_once(text: str) -> None:
    """Log a warning unless this process did so before."""
    if text not in _said:
        _said.add(text)
        logger.warning("%s", text)


def econfig_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record's `econfig`; raises `errors.RecordRefused` for one that is neither a mapping nor its JSON."""
    given = record.get("econfig")
    if isinstance(given, str) and given.strip():
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            given = 0
    if given in (None, ""):
        return {}
    if not isinstance(given, Mapping):
        raise errors.RecordRefused("its econfig is no mapping", hint="give a mapping, or its JSON text")
    return dict(given)


def refuse_absent_agent(agent_type: str) -> None:
    """Raise `errors.ConfigError` for an agent that has a name and a configuration, but no program yet."""
    if agent_type not in registry.AGENT_NAMES:
        raise errors.ConfigError(
            f"the agent {agent_type} is not part of this version",
            hint=f"it has: {', '.join(registry.AGENT_NAMES)}",
        )


def settings_of(call: Call, record: Mapping[str, Any]) -> Settings:
    """Return the effective settings of a call; raises `errors.ConfigError`."""
    econfig = econfig_of(record)
    provider = None
    if call.agent_type in _PROVIDERS:
        argument, variable = _PROVIDERS[call.agent_type]
        provider = getattr(call, argument) or settings.variable(variable) or None
    loaded = settings.load(
        _config_for(call.agent_type, call.config),
        arguments={
            "agent.type": call.agent_type,
            "agent.provider": provider,
            "llm.base_url": call.base_url or record.get("override_base_url"),
            "llm.model": call.model,
            **call.arguments,
        },
        econfig={name: value for name, value in econfig.items() if name != "agent_type"},
    )
    if not loaded.llm.base_url:
        raise errors.ConfigError("no model endpoint is named", hint="pass override_base_url")
    return _inside(loaded, call.timeout_s or econfig.get("timeout"))


def identity(call: Call, record: Mapping[str, Any]) -> str | None:
    """Return the rollout's identity; None when nothing in the call belongs to this rollout alone."""
    if call.rollout_key:
        return _digest(f"rollout_key {call.rollout_key}")
    found = identity_of(key_of(call, record))
    if found is None and record.get("rollout_key"):
        return _digest(f"rollout_key {record['rollout_key']}")
    if found is None:
        say_once(
            "calls come with a key that is not their own, so each is a rollout of its own and none can be asked for"
            " again: give each its key (override_api_key) or a rollout_key"
        )
    return found


def _config_for(agent_type: str, config: str) -> str:
    """Return the configuration to use: a trainer may name one of another kind of agent."""
    if not isinstance(config, str):
        raise errors.ConfigError(
            f"the configuration {config!r} is no name", hint="correct econfig.agent_config"
        )
    if agent_type not in DEFAULT_CONFIGS:
        known = ", ".join(DEFAULT_CONFIGS)
        raise errors.ConfigError(f"there is no agent called {agent_type!r}", hint=f"choose one of: {known}")
    kind = settings.agent_type_of(config)
    if kind == agent_type:
        return config
    used = DEFAULT_CONFIGS[agent_type]
    say_once(
        f"the configuration {config} is for the agent {kind}, but {agent_type} was asked for: {used} is used instead"
        f" (name another one in econfig.agent_config)"
    )
    return used


def _inside(loaded: Settings, outer_s: object) -> Settings:
    """Return the settings with a deadline inside the caller's timeout of `outer_s` seconds, where that is known."""
    if outer_s is None:
        return loaded
    seconds = _seconds(outer_s)
    if not 0 < seconds < math.inf:
        raise errors.ConfigError(
            f"timeout {outer_s!r} is no number of seconds", hint="correct econfig.timeout"
        )
    deadline_s = seconds - min(_MOST_MARGIN_S, max(_LEAST_MARGIN_S, _MARGIN * seconds))
    limits = loaded.limits
    if limits.deadline_s is not None and limits.deadline_s <= deadline_s:
        return loaded
    changed: dict[str, float] = {"deadline_s": deadline_s}
    if deadline_s <= 0:
        raise errors.ConfigError(f"a timeout of {seconds:g} s leaves no time", hint="raise econfig.timeout")
    if limits.grade_s + limits.release_s > deadline_s / 2:
        changed |= {"grade_s": deadline_s * 0.4, "release_s": min(limits.release_s, deadline_s * 0.1)}
        say_once(
            f"the caller's timeout of {seconds:g} s is short: {changed['grade_s']:.0f} s of it are kept for grading"
            f" instead of limits.grade_s {limits.grade_s:g}; raise econfig.timeout"
        )
    return loaded.model_copy(update={"limits": limits.model_copy(update=changed)})


def _seconds(given: object) -> float:
    try:
        return float(given) if isinstance(given, int | float | str) and given is not True else math.nan
    except (ValueError, OverflowError):
        return math.nan


def key_of(call: Call, record: Mapping[str, Any]) -> str:
    """Return the API key of a call: the caller's word, else the record's."""
    return str(call.api_key or "").strip() or str(record.get("override_api_key") or "").strip()


def identity_of(api_key: str, environ: Mapping[str, str] | None = None) -> str | None:
    """Return the sha256 of a rollout's own key; None for a key that other rollouts use as well."""
    shared = api_key.strip().lower() in _PLACEHOLDERS
    if shared or api_key == settings.variable("OPENAI_API_KEY", environ=environ):
        return None
    return _digest(api_key)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def task_of(record: Mapping[str, Any]) -> Task:
    """Return the task of a record, blocking; raises `errors.RecordRefused`."""
    from orchestrator.tasks import swebench_rows
    from orchestrator.tasks.dialects import normalise

    task = normalise({k: v for k, v in record.items() if k not in _CALL_KEYS}, base_dir=Path.cwd())
    if not swebench_rows.needs_script(task):
        return task
    with _asking:  # samples and epochs bring the same row again, and each question costs a process of seconds
        known = _completed.get(task.sha256)
        if known is None:
            (known,) = swebench_rows.with_eval_scripts([task], python=Path(sys.executable))
            if len(_completed) >= _KEPT:
                _completed.pop(next(iter(_completed)))
            _completed[task.sha256] = known
    if isinstance(known, errors.RecordRefused):
        raise known
    return known


_KEPT = 4096
_completed: dict[str, Task | errors.RecordRefused] = {}
"""Digest of a row without a script -> the task with it, or why there is none; the oldest are forgotten."""
_asking = threading.Lock()
