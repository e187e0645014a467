"""Loads all modules of a rollout at once, so that none is loaded in the middle of one, from files changed meanwhile."""

from __future__ import annotations

import gc
import importlib
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

_ALWAYS = (
    "orchestrator.entry.run",
    "orchestrator.grading.pipeline",
    "orchestrator.grading.validate",
    "orchestrator.sandbox.registry",
    "orchestrator.sandbox.local",
    "orchestrator.tasks.dialects",
    "orchestrator.tasks.swebench_rows",
    "sqlalchemy.dialects.sqlite.aiosqlite",
    "aiosqlite",
)


@cache
def load(agent_type: str) -> ModuleType:
    """Import everything that a rollout of this kind of agent needs, blocking; return the module that runs calls."""
    from orchestrator.agents import registry

    for name in _ALWAYS:
        importlib.import_module(name)
    registry.warm(agent_type)
    return importlib.import_module(_ALWAYS[0])


@cache
def freeze() -> None:
    """Once per process, take everything that is loaded out of garbage collections: they look at what rollouts hold only."""
    gc.freeze()
