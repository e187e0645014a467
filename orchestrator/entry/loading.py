"""Loads all modules of a rollout at once, so that none is loaded in the middle of one, from files changed meanwhile."""

from __future__ import annotations

import gc
import importlib
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
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

    with _without_collections():
        for name in _ALWAYS:
            importlib.import_module(name)
        registry.warm(agent_type)
    return importlib.import_module(_ALWAYS[0])


@contextmanager
def _without_collections() -> Iterator[None]:
    """Let nobody wait for collections that look at more and more modules, none of which is garbage.

    What was loaded is frozen before collections go on: the next one, on any callback, would look at all of it.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.freeze()
            gc.enable()


@cache
def thaw() -> None:
    """Once, give back to the collector what was frozen, for settings that leave it alone."""
    gc.unfreeze()


@cache
def freeze(when: str) -> None:
    """Once for each `when`, take everything there is out of garbage collections: they look at what came later only."""
    gc.freeze()
