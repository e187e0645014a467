"""A recorder that keeps steps in memory, for agents that run without a store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.agents.base import Step

if TYPE_CHECKING:
    from orchestrator.agents.base import LlmCall, Message


class MemoryRecorder:
    """Keeps every step; `messages` is the transcript that a store would put together from them."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    async def asking(self) -> None:
        """Keep nothing of it."""

    async def answered(self, step: str, calls: list[LlmCall]) -> None:
        """Keep the calls as a step without messages; its name must be new, as a store demands."""
        if any(known.name == step for known in self.steps):
            raise ValueError(f"a step called {step} is already recorded")
        self.steps.append(Step(name=step, messages=[], calls=list(calls)))

    async def record(self, step: Step) -> None:
        """Keep the step in the place of its calls."""
        if not self.steps or self.steps[-1].name != step.name or self.steps[-1].messages:
            raise ValueError(f"the calls of {step.name} are not recorded, or the step is already")
        self.steps[-1] = step

    @property
    def messages(self) -> list[Message]:
        """All messages of all steps in order."""
        return [message for step in self.steps for message in step.messages]
