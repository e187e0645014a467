"""One agent run with everything around it small: recorded turns or any endpoint, a sandbox, steps in memory."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import SecretStr

from orchestrator.agents.base import AgentRun, AgentTask, Endpoint
from orchestrator.agents.swe.loop import SweAgent
from orchestrator.settings import AgentSettings, LlmSettings
from orchestrator.testing.recorder import MemoryRecorder
from orchestrator.testing.replay import parse_replay

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from orchestrator.agents.base import AgentExit, Step
    from orchestrator.sandbox.base import Sandbox
    from orchestrator.testing.replay import Script

INSTANCE = "tried__out-1"
"""The instance id of every run here."""


def script(*turns: dict[str, Any]) -> Script:
    """Return a script of one scenario, whose turns are written as in a replay file."""
    return parse_replay({INSTANCE: [{"name": "only", "turns": list(turns)}]})


def calling(name: str, **arguments: object) -> dict[str, Any]:
    """Return a turn with one tool call."""
    return {"tool_calls": [{"name": name, "arguments": arguments}]}


@dataclass(kw_only=True, slots=True)
class TryOut:
    """What an agent run needs. `run` may be called several times to continue one attempt."""

    sandbox: Sandbox
    settings: AgentSettings = field(
        default_factory=lambda: AgentSettings(tools=("bash", "search_replace", "view", "create", "submit"))
    )
    llm: LlmSettings = field(default_factory=LlmSettings)
    api_key: str = "key-of-this-rollout"
    problem_statement: str = "It does not work."
    recorder: MemoryRecorder = field(default_factory=MemoryRecorder)
    history: Sequence[Step] = ()
    monotonic: Callable[[], float] = time.monotonic
    is_ours: Callable[[], bool] = lambda: True
    pauses: list[float] = field(default_factory=list)
    """The pauses between repeated requests, which are not waited for."""

    async def run(self, base_url: str) -> AgentExit:
        """Run the built-in agent against an endpoint."""
        agent = SweAgent(self.llm, sleep=self._pause, jitter=lambda: 1.0)
        return await agent.run(
            AgentRun(
                task=AgentTask(
                    instance_id=INSTANCE,
                    problem_statement=self.problem_statement,
                    workdir=self.sandbox.workdir,
                ),
                sandbox=self.sandbox,
                endpoint=Endpoint(base_url=base_url, model="replay", api_key=SecretStr(self.api_key)),
                settings=self.settings,
                recorder=self.recorder,
                monotonic=self.monotonic,
                history=list(self.history),
                is_ours=self.is_ours,
            )
        )

    async def _pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
