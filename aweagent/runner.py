"""The entry that takes its settings from the record and the environment."""

from __future__ import annotations

from typing import Any


async def run_agent_return_reward(data: dict[str, Any]) -> tuple[float | None, dict[str, Any]]:
    """Run one record and return `(reward, stats)`, as `aweagent.lifecycle.run_agent_with_reward` does.

    Environment: `SWEAgent_AGENT_TYPE` (swe), `SWEAgent_CONFIG` (train), `LOG_DIR` (./logs). The record may carry
    `override_base_url` and `override_api_key`; without them, `OPENAI_BASE_URL` and `OPENAI_API_KEY` count.
    """
    from aweagent.lifecycle import run_agent_with_reward
    from orchestrator.settings import variable

    return await run_agent_with_reward(
        data,
        agent_type=variable("SWEAgent_AGENT_TYPE", "swe"),
        agent_config=variable("SWEAgent_CONFIG", "train"),
        result_dir=variable("LOG_DIR", "./logs"),
        override_api_key=data.get("override_api_key") or variable("OPENAI_API_KEY"),
        override_base_url=data.get("override_base_url"),
    )
