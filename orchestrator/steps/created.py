"""While `created`: make the task sandbox whose intent is already committed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from orchestrator import errors

if TYPE_CHECKING:
    from orchestrator.sandbox.base import Sandbox, SandboxProvider, SandboxSpec


async def make_sandbox(provider: SandboxProvider, spec: SandboxSpec) -> Sandbox:
    """Create a sandbox within its deadline.

    Raises `errors.SandboxCreateFailed` (whatever was made is found by its key later) or `errors.TaskInvalid`.
    """
    try:
        async with asyncio.timeout(spec.create_timeout_s):
            return await provider.create(spec)
    except TimeoutError:
        raise errors.SandboxCreateFailed(
            f"sandbox {spec.key} was not ready after {spec.create_timeout_s:g} s",
            hint="raise sandbox.create_timeout_s, or look at the provider's load",
        ) from None
