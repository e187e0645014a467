"""The entry that takes its settings from the record and the environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


async def run_agent_return_reward(data: object) -> tuple[float | None, dict[str, Any]]:
    """Run one record and return `(reward, stats)`, as `aweagent.lifecycle.run_agent_with_reward` does.

    Environment: `SWEAgent_AGENT_TYPE` (swe), `SWEAgent_CONFIG` (train), `LOG_DIR` (./logs), `LLM_MODEL`,
    `OPENCODE_PROVIDER`, `CODEX_PROVIDER`. The record may carry `override_base_url`, `override_api_key`, `rollout_key` and
    an `econfig`; without the first two, `OPENAI_BASE_URL` and `OPENAI_API_KEY` count.
    """
    import asyncio
    from importlib import import_module

    from aweagent.lifecycle import run_agent_with_reward

    environment = await asyncio.to_thread(import_module, "orchestrator.settings")  # beside the event loop
    variable = environment.variable
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
    )


def _mapping(econfig: object) -> Mapping[str, Any]:
    """Return an `econfig` that is a mapping or its JSON; any other is refused by the call itself."""
    import json

    if isinstance(econfig, str):
        try:
            econfig = json.loads(econfig)
        except ValueError:
            return {}
    return econfig if isinstance(econfig, Mapping) else {}
