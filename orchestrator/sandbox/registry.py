"""Short names of sandbox providers. A provider is imported when it is first asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

if TYPE_CHECKING:
    from pathlib import Path

    from orchestrator.sandbox.base import SandboxProvider
    from orchestrator.settings import SandboxSettings

PROVIDER_NAMES = ("local",)
"""Every name that a configuration may give."""


def make(settings: SandboxSettings, *, cache_dir: Path) -> SandboxProvider:
    """Return the provider that the settings name; it has touched nothing yet."""
    match settings.provider:
        case "local":
            from orchestrator.sandbox.local import LocalProvider

            return LocalProvider(settings, cache_dir=cache_dir)
        case _:
            assert_never(settings.provider)
