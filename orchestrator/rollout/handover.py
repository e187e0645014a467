"""What a caller is handed is a fact too, written down before it is handed over: a trainer trains on nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from store import rows

if TYPE_CHECKING:
    from orchestrator.rollout.runtime import Runtime
    from orchestrator.rollout.submission import Request


WITHDRAWN = "-withdrawn"
"""Ends the id of a delivery that takes back the one before it; the view `deliveries_v` joins the two."""


class Handover:
    """One call's answer; noting it again changes nothing."""

    def __init__(self, runtime: Runtime, rollout_id: str, request: Request) -> None:
        self._store = runtime.store
        self._delivery_id = runtime.new_id()
        self._rollout_id = rollout_id
        self._request = request

    async def note(self, value: float | None = None) -> None:
        """Store that the caller gets this reward, or the word that there is none."""
        await self._store.deliver(self._delivery(self._delivery_id, value=value))

    async def withdrawn(self, exception: str) -> None:
        """Store that the caller got an exception, whatever was noted before: nothing was handed over."""
        await self._store.deliver(self._delivery(f"{self._delivery_id}{WITHDRAWN}", exception=exception))

    def _delivery(self, delivery_id: str, **given: Any) -> rows.Delivery:  # noqa: ANN401 - what is handed over
        return rows.Delivery(
            delivery_id=delivery_id,
            rollout_id=self._rollout_id,
            session_ref=self._request.session_ref,
            policy_version=self._request.policy_version,
            **given,
        )
