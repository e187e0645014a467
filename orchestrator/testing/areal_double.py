"""AReaL without AReaL: the modules that its SWE example needs, and a class that treats us as that example does.

The class makes the same of every return and exception as `examples/swe/agent.py` of AReaL cbff54d6; its text is ours.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import types
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

logger = logging.getLogger(__name__)

_CONFIGS = {
    "swe": "1_0_0/min-swe-agent-train-top1",
    "cc": "train_cc_time3600",
    "oh": "eval_oh",
    "opencode": "eval_opencode",
    "codex": "eval_codex",
}


@dataclass
class Tracker:
    """Keeps what is published, as AReaL's statistics tracker takes it: each value through `float`."""

    scalars: list[tuple[str, str, float]] = field(default_factory=list)
    """(scope, name, value)"""
    broken: bool = False

    def get(self, scope: str) -> Tracker._Scope:
        """Return the tracker of a scope."""
        return Tracker._Scope(self, scope)

    @dataclass
    class _Scope:
        tracker: Tracker
        scope: str

        def scalar(self, **values: Any) -> None:  # noqa: ANN401 - as AReaL's
            """Take numbers."""
            if self.tracker.broken:
                raise RuntimeError("the tracker is broken")
            self.tracker.scalars += [(self.scope, name, float(value)) for name, value in values.items()]


@contextmanager
def areal_modules(*, context: object | None = None, tracker: Tracker | None = None) -> Iterator[None]:
    """Offer `areal` with its logging; with `context` and `tracker` also the modules that they live in.

    `context` is what `workflow_context.get()` returns, as seen by every task.
    """
    made: dict[str, types.ModuleType] = {
        name: types.ModuleType(name) for name in ("areal", "areal.utils", "areal.utils.logging")
    }
    vars(made["areal.utils.logging"])["getLogger"] = lambda name=None, *_a, **_k: logging.getLogger(name)
    if context is not None:
        for name in ("areal.infra", "areal.infra.workflow_context"):
            made[name] = types.ModuleType(name)
        vars(made["areal.infra.workflow_context"])["get"] = lambda: context
        vars(made["areal.infra.workflow_context"])["stat_scope"] = lambda: "rollout"
    if tracker is not None:
        module = made["areal.utils.stats_tracker"] = types.ModuleType("areal.utils.stats_tracker")
        vars(module)["get"] = tracker.get
    for name, module in made.items():
        module.__path__ = []
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(made[parent], child, module)
    before = {name: sys.modules.get(name) for name in made}
    sys.modules.update(made)
    try:
        yield
    finally:
        for name, module_before in before.items():
            if module_before is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module_before


class SWEWorkflowDouble:
    """What AReaL's example class does with us: every exception of ours is a reward of 0.0 that is trained on."""

    def __init__(
        self,
        run_agent_with_reward: Callable[..., Awaitable[tuple[float | None, dict[str, Any]]]],
        econfig: dict[str, Any] | None = None,
        gen_args: dict[str, Any] | None = None,
        timeout: float = 1800.0,
    ) -> None:
        self._run_agent_with_reward = run_agent_with_reward
        self.econfig = econfig or {}
        self.gen_args = gen_args or {}
        self.timeout = self.econfig.get("timeout", timeout)

    async def run(self, data: dict[str, Any], **extra: Any) -> float:  # noqa: ANN401 - as AReaL's
        """Run one record under the outer timeout."""
        econfig = {**self.econfig, **data.get("econfig", {})}
        agent_type = str(econfig.get("agent_type") or "swe").strip().lower()
        config = (
            econfig.get("agent_config")
            or econfig.get(f"{agent_type}_agent_config")
            or econfig.get("swe_agent_config")
            or _CONFIGS.get(agent_type)
            or agent_type
        )
        reward = await asyncio.wait_for(
            self._episode(data, agent_type, config, econfig, extra["base_url"], extra["api_key"]),
            timeout=self.timeout,
        )
        return float(reward)  # type: ignore[arg-type] # None raises here, which drops the sample

    async def _episode(
        self,
        data: dict[str, Any],
        agent_type: str,
        config: str,
        econfig: dict[str, Any],
        base_url: str,
        api_key: str,
    ) -> float | None:
        try:
            reward, _ = await self._run_agent_with_reward(
                data,
                agent_type=agent_type,
                agent_config=config,
                result_dir=os.environ.get("LOG_DIR", "./logs"),
                override_api_key=api_key,
                override_base_url=base_url,
                override_llm_model=econfig.get("llm_model"),
                override_opencode_provider=econfig.get("opencode_provider"),
                override_codex_provider=econfig.get("codex_provider"),
            )
        except Exception as e:
            logger.exception("episode error, reward 0.0: %s", e)  # noqa: TRY401 - as AReaL's
            return 0.0
        return reward
