"""Named places where a test may make the process fail. A closed list: a write under any other name is refused.

Off by default and without cost worth mentioning; nothing in the product installs an action.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

WRITES = (
    "register",
    "stop",
    "submit",
    "claim",
    "heartbeat",
    "reacquire",
    "request_cancel",
    "transition.provision",
    "transition.start_agent",
    "transition.take_patch",
    "transition.grade",
    "transition.release",
    "transition.restart",
    "transition.fail",
    "record",
    "next_sandbox_ordinal",
    "close_sandbox",
    "note_failed_release",
    "record_validation",
    "declare_sandbox",
    "note_live_sandbox",
    "give_up_sandbox",
    "give_up_abandoned",
    "give_up_ownerless",
    "take_from_dead",
    "write_off",
    "deliver",
)
"""Every kind of write there is."""

PHASES = ("before_commit", "after_commit")
"""Inside the transaction, when all statements ran; and when the commit is durable but nobody has been told."""

PLACES = (
    "sandbox.before_create",
    "sandbox.after_create",
    "sandbox.before_release",
    "sandbox.after_release",
    "agent.after_extract",
    "grade.after_grading",
)
"""Beside side effects that are no writes."""

POINTS = frozenset(f"{write}.{phase}" for write in WRITES for phase in PHASES) | frozenset(PLACES)

_action: Callable[[str], None] | None = None


def install(action: Callable[[str], None] | None) -> None:
    """Call `action` with the name of every point that is passed from now on; None switches it off."""
    global _action
    _action = action


def hit_each(writes: Iterable[str], phase: str) -> None:
    """Pass the points of many writes; it costs nothing while no action is installed."""
    if _action is not None:
        for write in writes:
            hit(f"{write}.{phase}")


def hit(point: str) -> None:
    """Pass a point; raises `KeyError` for one that is not on the list."""
    if point not in POINTS:
        raise KeyError(f"failpoint {point!r} is not declared")
    if _action is not None:
        _action(point)
