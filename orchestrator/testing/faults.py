"""A provider that fails where it is told to, around a real one: for trying out what the driver does about it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from orchestrator import errors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from orchestrator.sandbox.base import Instance, Isolation, Sandbox, SandboxProvider, SandboxSpec


class FaultyProvider:
    """Hands every call on to `inner`, unless `fault(call, number)` returns an error to raise.

    `call` is `create:task`, `create:grading` or `release`; `number` counts the calls of that name from 1.
    """

    def __init__(
        self,
        inner: SandboxProvider,
        fault: Callable[[str, int], BaseException | None] = lambda _call, _number: None,
    ) -> None:
        self.inner = inner
        self.fault = fault
        self.calls: Counter[str] = Counter()
        self.name = inner.name
        self.creates_late = inner.creates_late

    @property
    def ref(self) -> str:
        """See `base.SandboxProvider.ref`."""
        return self.inner.ref

    @property
    def gaps(self) -> Sequence[str]:
        """See `base.SandboxProvider.gaps`."""
        return self.inner.gaps

    async def preflight(self) -> Isolation:
        """See `base.SandboxProvider.preflight`."""
        return await self.inner.preflight()

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """See `base.SandboxProvider.create`."""
        self._count(f"create:{spec.role}")
        return await self.inner.create(spec)

    async def attach(self, spec: SandboxSpec, provider_id: str) -> Sandbox:
        """See `base.SandboxProvider.attach`."""
        return await self.inner.attach(spec, provider_id)

    async def release(self, key: str, ref: str | None = None) -> str:
        """See `base.SandboxProvider.release`."""
        self._count("release")
        return await self.inner.release(key, ref)

    async def list_ours(self, prefix: str, ref: str | None = None) -> list[Instance]:
        """See `base.SandboxProvider.list_ours`."""
        return await self.inner.list_ours(prefix, ref)

    async def close(self) -> None:
        """See `base.SandboxProvider.close`."""
        await self.inner.close()

    def _count(self, call: str) -> None:
        self.calls[call] += 1
        error = self.fault(call, self.calls[call])
        if error is not None:
            raise error


def failing(call: str, *numbers: int) -> Callable[[str, int], BaseException | None]:
    """Return a fault: the given calls of one name fail, or all of them when no number is given."""

    def fault(name: str, number: int) -> BaseException | None:
        if name != call or (numbers and number not in numbers):
            return None
        if call == "release":
            return errors.SandboxLost("the provider does not answer")
        return errors.SandboxCreateFailed("the provider refused")

    return fault
