"""While `graded`: give every sandbox back, with the provider's proof."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from orchestrator import errors

if TYPE_CHECKING:
    from orchestrator.sandbox.base import SandboxProvider

RELEASE_TIMEOUT_S = 120.0


async def listed(provider: SandboxProvider, key: str, ref: str) -> list[str]:
    """Return the provider's ids of the sandboxes with this key that the authority `ref` has.

    Raises `errors.SandboxLost` when it does not answer.
    """
    try:
        async with asyncio.timeout(RELEASE_TIMEOUT_S):
            listed = await provider.list_ours(key, ref)
            return [found.provider_id for found in listed if found.key == key]
    except TimeoutError:
        raise errors.SandboxLost(
            f"the provider did not list its sandboxes within {RELEASE_TIMEOUT_S:g} s"
        ) from None
    except Exception as error:
        raise _unforeseen(error) from error


async def release(provider: SandboxProvider, key: str, ref: str) -> str:
    """Remove a sandbox that was made under the authority `ref` and return the proof that it is gone.

    Raises `errors.SandboxLost` when there is none.
    """
    try:
        async with asyncio.timeout(RELEASE_TIMEOUT_S):
            return await provider.release(key, ref)
    except TimeoutError:
        raise errors.SandboxLost(
            f"the provider did not confirm within {RELEASE_TIMEOUT_S:g} s that sandbox {key} is gone",
            hint="its ledger row stays open; run the command again",
        ) from None
    except Exception as error:
        raise _unforeseen(error) from error


def _unforeseen(error: Exception) -> errors.Failure:
    """Return the failure that a backend's own error is: it proves nothing about the sandbox, and stops nobody."""
    if isinstance(error, errors.Failure):
        return error
    return errors.SandboxLost(f"the provider broke: {error!r}")
