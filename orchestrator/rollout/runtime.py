"""What a walk is given from outside: store, provider, endpoint, clock, ids. Nothing of it is made here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from orchestrator.agents.base import Endpoint
    from orchestrator.sandbox.base import SandboxProvider
    from orchestrator.settings import Settings
    from orchestrator.states import State
    from store.heartbeat import Heartbeat
    from store.history import Record
    from store.rollouts import Store


@dataclass(frozen=True, kw_only=True, slots=True)
class Runtime:
    """Everything a walk needs besides the rollout itself; shared by all walks of a process."""

    store: Store
    heartbeat: Heartbeat
    provider: SandboxProvider
    endpoint_of: Callable[[Record, Settings], Endpoint]
    """Rollout row and settings -> where its model answers, with the key."""
    new_id: Callable[[], str]
    """Unique for ever, sorted by time."""
    monotonic: Callable[[], float]
    elapsed: Callable[[], float]
    """Seconds of real time, a suspended machine's included."""
    random: Callable[[], float]
    """In [0, 1): spreads retries."""
    on_cancel: Literal["interrupt", "fail"] = "interrupt"
    """When the caller cancels: give the attempt back for a later resume, or end the rollout as cancelled."""
    serves_sessions: bool = True
    """Session-bound rollouts are walked for their own callers, who are here; else they can only be ended."""
    in_background: Callable[[Coroutine[Any, Any, Any]], object] | None = None
    """Takes over the clean-up after a walk, so that its caller need not wait; None: the walk waits for it."""
    on_move: Callable[[str, State], None] = lambda _rollout_id, _state: None
    """Told after every durable state change; for progress displays."""

    async def later(self, work: Coroutine[Any, Any, Any]) -> None:
        """Do work that nobody has to wait for: beside the caller where somebody sees to it, else now."""
        if self.in_background is None:
            await work
        else:
            self.in_background(work)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How a walk ended. `state` is not terminal when the rollout waits for another attempt or has another owner."""

    rollout_id: str
    state: State
    reward: float | None = None
    stats: dict[str, Any] | None = None
    failure_class: str | None = None
    message: str = ""
    again_in_s: float | None = None
    """Seconds until the next attempt is due; None when this walk has nothing more to expect."""
