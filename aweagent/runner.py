"""The entry that takes its settings from the record and the environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


async def run_agent_return_reward(data: object) -> tuple[float | None, dict[str, Any]]:
    """Run one record and return `(reward, stats)`, as `aweagent.lifecycle.run_agent_with_reward` does.

    Environment: `SWEAgent_AGENT_TYPE` (swe), `SWEAgent_CONFIG` (train), `LOG_DIR` (./logs), `LLM_MODEL`,
    `OPENCODE_PROVIDER`, `CODEX_PROVIDER`. The record may carry `override_base_url`, `override_api_key`, `rollout_key` and
    an `econfig`; without the first two, `OPENAI_BASE_URL` and `OPENAI_API_KEY` count.
    """
    from aweagent.lifecycle import run_agent_with_reward

    variable = await _environment()
    record: Mapping[str, Any] = data if isinstance(data, Mapping) else {}
    econfig = _mapping(record.get("econfig"))
    agent_type = str(econfig.get("agent_type") or variable("SWEAgent_AGENT_TYPE", "swe")).strip().lower()
    named = econfig.get("agent_config") or econfig.get(f"{agent_type}_agent_config")
    return await run_agent_with_reward(
        data,
        agent_type=agent_type,
        agent_config=named or variable("SWEAgent_CONFIG", "train"),
        result_dir=variable("LOG_DIR", "./logs"),
        override_api_key=record.get("override_api_key") or variable("OPENAI_API_KEY"),
        override_base_url=record.get("override_base_url"),
        override_llm_model=econfig.get("llm_model") or None,
        override_opencode_provider=econfig.get("opencode_provider") or None,
        override_codex_provider=econfig.get("codex_provider") or None,
        rollout_key=str(record.get("rollout_key") or "") or None,
    )


async def _environment() -> Callable[..., str]:
    """Return what reads environment variables; where the program cannot be loaded, the call itself says so."""
    import asyncio
    from importlib import import_module

    try:
        settings = await asyncio.to_thread(import_module, "orchestrator.settings")  # beside the event loop
    except Exception:  # noqa: BLE001 - whatever is broken, a trainer would train on it
        return lambda _name, default="": default
    found: Callable[..., str] = settings.variable
    return found


def _mapping(econfig: object) -> Mapping[str, Any]:
    """Return an `econfig` that is a mapping or its JSON; any other is refused by the call itself."""
    import json

    if isinstance(econfig, str):
        try:
            econfig = json.loads(econfig)
        except (ValueError, RecursionError):
            return {}
    return econfig if isinstance(econfig, Mapping) else {}
