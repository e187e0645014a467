"""What a caller is handed is a fact too, written down before it is handed over: a trainer trains on nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from store import rows

if TYPE_CHECKING:
    from orchestrator.rollout.runtime import Runtime
    from orchestrator.rollout.submission import Request


class Handover:
    """One call's answer; noting it again changes nothing."""

    def __init__(self, runtime: Runtime, rollout_id: str, request: Request) -> None:
        self._store = runtime.store
        self._delivery_id = runtime.new_id()
        self._rollout_id = rollout_id
        self._request = request

    async def note(self, value: float | None = None, *, exception: str | None = None) -> None:
        """Store that the caller gets this reward, the word that there is none, or an exception."""
        await self._store.deliver(
            rows.Delivery(
                delivery_id=self._delivery_id,
                rollout_id=self._rollout_id,
                value=value,
                exception=exception,
                session_ref=self._request.session_ref,
                policy_version=self._request.policy_version,
            )
        )
