"""One turn after the model has spoken: answer every tool call once and in order, count what happened."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from orchestrator import errors
from orchestrator.agents.swe import toolbox
from orchestrator.agents.swe.tools.base import ToolContext, ToolResult

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestrator.agents.base import AgentRun, Message
    from orchestrator.agents.swe.reply import Reply, ToolCall

_GRACE_S = 15.0
"""A command is given what is left of the run's time; a sandbox may take this much longer to kill it."""
_ALIVE_TIMEOUT_S = 30.0

REMINDER = "That answer called no tool. Go on with a tool call, {ending}."
CUT = (
    "Your answer reached the limit of {limit} tokens before it called a tool. "
    "Answer more briefly and call a tool early."
)


@dataclass(kw_only=True, slots=True)
class Turn:
    """What one turn adds to the conversation and to the counts."""

    answers: dict[str, str] = field(default_factory=dict)
    """Tool call id -> what its tool message says, in the order of the calls."""
    after: list[Message] = field(default_factory=list)
    tool_calls: int = 0
    format_errors: int = 0
    command_timeouts: int = 0
    truncated: int = 0
    stopped: str = ""
    """Why the remaining calls of this turn are not run."""
    destroyed: errors.SandboxLost | None = None
    """The agent's own command ended the shell, but the sandbox still answers."""
    lost: errors.SandboxLost | None = None

    @property
    def messages(self) -> list[Message]:
        """The messages that follow the assistant's."""
        told: list[Message] = [
            {"role": "tool", "tool_call_id": call_id, "content": text}
            for call_id, text in self.answers.items()
        ]
        return told + self.after


class TurnTaker:
    """Runs the tool calls of a run, turn by turn."""

    def __init__(self, run: AgentRun, tools: toolbox.Toolbox, remaining_s: Callable[[], float]) -> None:
        self.run = run
        self.tools = tools
        self.remaining_s = remaining_s

    async def take(self, reply: Reply, *, remind: bool) -> Turn:
        """Answer the reply. Without a tool call the answer is a user message, unless `remind` says not to.

        Never raises `errors.SandboxLost`: the turn holds it, so that it can be recorded whole first.
        """
        turn = Turn(tool_calls=len(reply.tool_calls))
        if not reply.tool_calls:
            self._answer_silence(turn, cut=reply.cut, remind=remind)
        for call in reply.tool_calls:
            await self._answer(turn, call, cut=reply.cut)
        return turn

    def _answer_silence(self, turn: Turn, *, cut: bool, remind: bool) -> None:
        if cut:
            turn.format_errors = 1
            text = CUT.format(limit=self.tools.max_completion_tokens)
        elif remind:
            done = "submit" in self.tools.tools
            text = REMINDER.format(
                ending="or call submit if the work is done"
                if done
                else "or answer without one again to end here"
            )
        else:
            return
        turn.after.append({"role": "user", "content": text})

    async def _answer(self, turn: Turn, call: ToolCall, *, cut: bool) -> None:
        if call.id in turn.answers:
            turn.format_errors += 1
            turn.answers[call.id] += "\n[a second call with the same id was not run]"
            return
        if not turn.stopped and self.remaining_s() <= 0:
            turn.stopped = "the time of the run is up"
        if turn.stopped:
            turn.answers[call.id] = f"Not run: {turn.stopped}."
            return
        try:
            tool, arguments = self.tools.understand(call, cut=cut)
        except toolbox.FormatError as error:
            turn.format_errors += 1
            turn.answers[call.id] = f"error: {error}"
            return
        context = ToolContext(
            sandbox=self.run.sandbox, settings=self.run.settings, remaining_s=self.remaining_s()
        )
        try:
            async with asyncio.timeout(context.remaining_s + _GRACE_S):
                result = await toolbox.use(tool, arguments, context)
        except TimeoutError:
            result = ToolResult(text="[stopped: the time of the run is up]", timed_out=True)
        except errors.SandboxLost as error:
            result = await self._sandbox_lost(turn, error, by_command=call.name == "bash")
        self._count(turn, result)
        turn.answers[call.id] = result.text

    async def _sandbox_lost(self, turn: Turn, error: errors.SandboxLost, *, by_command: bool) -> ToolResult:
        turn.stopped = "the sandbox is gone"
        if by_command and await self._alive():
            turn.destroyed = error
            return ToolResult(text=f"[the command broke the sandbox: {error}]")
        turn.lost = error
        return ToolResult(text=f"[the sandbox was lost: {error}]")

    async def _alive(self) -> bool:
        try:
            async with asyncio.timeout(_ALIVE_TIMEOUT_S):
                return await self.run.sandbox.alive()
        except (TimeoutError, errors.SandboxLost):
            return False

    @staticmethod
    def _count(turn: Turn, result: ToolResult) -> None:
        turn.command_timeouts += result.timed_out
        turn.truncated += result.truncated
        if result.submitted:
            turn.stopped = "the work was already submitted"
