"""The call that AReaL makes for each rollout."""

from __future__ import annotations

from typing import Any


async def run_agent_with_reward(
    data: object,
    *,
    agent_type: str,
    agent_config: str,
    result_dir: str,
    override_api_key: str | None,
    override_base_url: str | None,
    override_llm_model: str | None = None,
    override_opencode_provider: str | None = None,
    override_codex_provider: str | None = None,
    rollout_key: str | None = None,
    **_unknown: object,
) -> tuple[float | None, dict[str, Any]]:
    """Run one record and return `(reward, stats)`; `(None, stats)` when there is no reward, which drops the sample.

    `agent_type` is swe, cc, oh, opencode or codex; `agent_config` a configuration of `aweagent.configs` or a file;
    `result_dir` gets per-episode logs. `rollout_key` tells rollouts apart whose API keys do not. Raises only
    `asyncio.CancelledError`. `data` is shared between samples and is never changed.
    """
    from orchestrator.entry import Call, run_record

    return await run_record(
        data,
        Call(
            agent_type=agent_type,
            config=agent_config,
            result_dir=result_dir,
            api_key=override_api_key or "",
            base_url=override_base_url,
            model=override_llm_model,
            opencode_provider=override_opencode_provider,
            codex_provider=override_codex_provider,
            rollout_key=rollout_key,
        ),
    )
