"""When a run is over: by the model's own word or by a limit, decided between two turns from what is recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.agents.base import AgentExit
from orchestrator.errors import ExitReason

if TYPE_CHECKING:
    from orchestrator.agents.swe.conversation import Conversation
    from orchestrator.settings import AgentSettings


def reached(talk: Conversation, settings: AgentSettings, remaining_s: float) -> AgentExit | None:
    """Return why the run is over, or None; the first reason that applies, from the most telling on."""
    rules = (
        (talk.submitted, ExitReason.SUBMITTED, "the agent submitted its work"),
        (
            talk.silent_in_a_row >= 2,
            ExitReason.NO_TOOL_CALL_STOP,
            "two answers in a row called no tool",
        ),
        (
            talk.unusable_in_a_row >= settings.max_format_errors,
            ExitReason.FORMAT_ERRORS,
            f"{talk.unusable_in_a_row} answers in a row could not be used",
        ),
        (
            talk.timeouts_in_a_row >= settings.max_command_timeouts,
            ExitReason.COMMAND_TIMEOUTS,
            f"{talk.timeouts_in_a_row} commands in a row took too long",
        ),
        (
            settings.token_limit is not None and talk.last_tokens > settings.token_limit,
            ExitReason.TOKEN_LIMIT,
            f"the last turn used {talk.last_tokens} tokens, allowed are {settings.token_limit}",
        ),
        (
            talk.turns >= settings.step_limit,
            ExitReason.STEP_LIMIT,
            f"all {settings.step_limit} steps are used",
        ),
        (remaining_s <= 0, ExitReason.WALL_TIME, f"the time of {settings.timeout_s:g} s is used"),
    )
    return next((AgentExit(reason=reason, message=text) for applies, reason, text in rules if applies), None)
