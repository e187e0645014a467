"""A recorder that keeps steps in memory, for agents that run without a store."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.agents.base import Message, Step


class MemoryRecorder:
    """Keeps every step; `messages` is the transcript that a store would put together from them."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    async def record(self, step: Step) -> None:
        """Keep the step; its name must be new, as a store demands."""
        if any(known.name == step.name for known in self.steps):
            raise ValueError(f"a step called {step.name} is already recorded")
        self.steps.append(step)

    @property
    def messages(self) -> list[Message]:
        """All messages of all steps in order."""
        return [message for step in self.steps for message in step.messages]
