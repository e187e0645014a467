"""Short names of agents. A kind of agent is imported when it is first asked for, so that listing names is cheap."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from orchestrator import errors

if TYPE_CHECKING:
    from orchestrator.agents.base import Agent
    from orchestrator.settings import LlmSettings

AGENT_NAMES = ("swe",)
"""Every name that `make` knows."""
_CONTINUE = frozenset({"swe"})


def continues(name: str) -> bool:
    """Say whether this kind of agent can go on after the steps that an earlier worker recorded."""
    return name in _CONTINUE


def warm(name: str) -> None:
    """Load, blocking, what this kind of agent would load in the middle of its first run."""
    if name == "swe":
        importlib.import_module("orchestrator.agents.swe.loop")
        importlib.import_module("orchestrator.agents.swe.model").warm()


def make(name: str, llm: LlmSettings) -> Agent:
    """Return the agent of this name; raises `errors.ConfigError` for a name nobody knows."""
    if name == "swe":
        from orchestrator.agents.swe.loop import SweAgent

        return SweAgent(llm)
    raise errors.ConfigError(
        f"there is no agent called {name!r}", hint=f"choose one of: {', '.join(AGENT_NAMES)}"
    )
