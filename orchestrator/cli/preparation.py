"""What `run` and `validate` do before anything is started: settings, tasks, sandboxes, each with its own message."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import yaml

from orchestrator import errors
from orchestrator.cli.console import complain, say
from orchestrator.settings import cache_dir
from orchestrator.tasks.source import load_tasks

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from orchestrator.sandbox.base import SandboxProvider
    from orchestrator.settings import Settings
    from orchestrator.tasks.source import Loaded


def parsed_changes(changes: Sequence[str]) -> dict[str, Any]:
    """Return `section.key=value` texts as a mapping; values are read as YAML.

    Raises `errors.ConfigError` for a text of another form.
    """
    found: dict[str, Any] = {}
    for change in changes:
        path, equals, value = change.partition("=")
        if not equals or path.count(".") != 1:
            raise errors.ConfigError(
                f"--set {change!r} is not section.key=value", hint="for example --set agent.step_limit=50"
            )
        try:
            found[path] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise errors.ConfigError(f"--set {change!r}: the value is no valid YAML") from None
    return found


async def load(path: Path) -> Loaded:
    """Load tasks and report every refused record; raises `errors.TaskFileError`."""
    loaded = await asyncio.to_thread(load_tasks, path, cache_dir=cache_dir())
    for refusal in loaded.refused:
        complain(f"refused: {refusal}", refusal.hint)
    return loaded


async def open_provider(settings: Settings) -> SandboxProvider:
    """Return a provider that has shown that it can make sandboxes, and say how they are kept apart.

    Raises `errors.IsolationRefused`.
    """
    from orchestrator.sandbox import registry

    provider = registry.make(settings.sandbox, cache_dir=cache_dir())
    isolation = await provider.preflight()
    warning = " (nothing keeps them from this machine)" if isolation == "none" else ""
    gaps = "".join(f"; WARNING: {gap}" for gap in provider.gaps)
    say(f"sandboxes: {settings.sandbox.provider}, isolation {isolation}{warning}{gaps}")
    return provider
