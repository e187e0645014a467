"""Our own AReaL workflow: `workflow="orchestrator.areal.RolloutWorkflow"`, with the arguments of AReaL's SWE example.

A sample without a reward is dropped here by an exception, where the example's class has only 0.0 to say it with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from orchestrator.entry import Call, answer
from orchestrator.entry.call import DEFAULT_CONFIGS

_DEFAULT_TIMEOUT_S = 1800.0
_GENERATION = {
    "temperature": "agent.temperature",
    "top_p": "agent.top_p",
    "max_new_tokens": "agent.max_completion_tokens",
    "max_completion_tokens": "agent.max_completion_tokens",
}
"""AReaL's generation arguments -> our settings; the others are the engine's own business."""
_LIMITS = {"step_limit": "agent.step_limit", "max_completion_tokens": "agent.max_completion_tokens"}


class RolloutDropped(Exception):
    """The rollout has no reward, so that its sample must not be trained on. AReaL rejects it and goes on."""


class RolloutWorkflow:
    """Runs one SWE-bench record per call; shared by the samples of a group, so it keeps nothing of any of them.

    Args:
        econfig: As for AReaL's example: `agent_type`, `agent_config`, `<type>_agent_config`, `llm_model`,
            `opencode_provider`, `codex_provider`, `timeout`; and `step_limit`, `max_completion_tokens`.
        gen_args: Generation arguments: `temperature`, `top_p`, `max_new_tokens` reach the agent.
        timeout: Seconds that an episode may take in all; `econfig.timeout` is stronger. The rollout's own deadline lies
            inside it.

    """

    def __init__(
        self,
        econfig: dict[str, Any] | None = None,
        gen_args: dict[str, Any] | None = None,
        timeout: float = _DEFAULT_TIMEOUT_S,
    ) -> None:
        self.econfig = econfig or {}
        self.gen_args = gen_args or {}
        self.timeout = float(self.econfig.get("timeout") or timeout)

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:  # noqa: ANN401 - AReaL's own
        """Run one record and return its reward.

        `extra_kwargs` are AReaL's: `base_url` and `api_key` of the rollout's session. Raises `RolloutDropped` when there
        is no reward, and `asyncio.CancelledError`.
        """
        found = await answer(*self._asked(data, extra_kwargs))
        if found is None or found.reward is None:
            raise RolloutDropped("the program cannot be loaded" if found is None else found.why)
        return float(found.reward)

    def _asked(self, data: object, extra: dict[str, Any]) -> tuple[object, Call]:
        """Return the record with both `econfig`s laid together, and the call; what cannot be read is refused by the call."""
        given = data.get("econfig") if isinstance(data, Mapping) else None
        if isinstance(given, str) and given.strip().startswith("{"):
            with suppress(ValueError, RecursionError):
                given = json.loads(given)
        if not isinstance(data, Mapping) or (given and not isinstance(given, Mapping)):
            return data, self._call(self.econfig, extra)
        own = {name: value for name, value in (given or {}).items() if value not in (None, "")}
        econfig = {**self.econfig, **own}
        return {**data, "econfig": econfig}, self._call(econfig, extra)

    def _call(self, econfig: dict[str, Any], extra: dict[str, Any]) -> Call:
        agent_type = str(econfig.get("agent_type") or "swe").strip().lower()
        given = {_GENERATION[name]: value for name, value in self.gen_args.items() if name in _GENERATION}
        given |= {_LIMITS[name]: econfig[name] for name in _LIMITS if econfig.get(name) not in (None, "")}
        return Call(
            agent_type=agent_type,
            config=econfig.get("agent_config")
            or econfig.get(f"{agent_type}_agent_config")
            or DEFAULT_CONFIGS.get(agent_type, agent_type),
            result_dir=None,
            api_key=extra.get("api_key") or "",
            base_url=extra.get("base_url"),
            model=econfig.get("llm_model") or None,
            opencode_provider=econfig.get("opencode_provider") or None,
            codex_provider=econfig.get("codex_provider") or None,
            timeout_s=econfig.get("timeout") or self.timeout,
            arguments=given,
        )
