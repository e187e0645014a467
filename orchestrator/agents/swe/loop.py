"""The built-in agent: ask the model, do what it says, record the step, until it is done or a limit is reached."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from typing import TYPE_CHECKING, Any

from orchestrator import errors
from orchestrator.agents.base import AgentExit, Step
from orchestrator.agents.swe import limits, model
from orchestrator.agents.swe.conversation import Conversation, opening
from orchestrator.agents.swe.toolbox import Toolbox
from orchestrator.agents.swe.trouble import Kind, Trouble
from orchestrator.agents.swe.turn import TurnTaker
from orchestrator.errors import ExitReason

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from orchestrator.agents.base import AgentRun
    from orchestrator.agents.swe.model import Answer, Model
    from orchestrator.agents.swe.reply import Reply
    from orchestrator.agents.swe.turn import Turn
    from orchestrator.settings import AgentSettings, LlmSettings


class SweAgent:
    """Works on a task through the chat completions API of an OpenAI-compatible endpoint."""

    def __init__(
        self,
        llm: LlmSettings,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.llm = llm
        self.sleep = sleep
        self.jitter = jitter

    async def run(self, run: AgentRun) -> AgentExit:
        """Work until done or out of a limit.

        Raises `errors.LlmUnreachable`, `errors.LlmSessionGone`, `errors.NoLlmCall` or `errors.SandboxLost`.
        """
        async with model.connect(
            run.endpoint,
            self.llm,
            run.monotonic,
            sleep=self.sleep,
            jitter=self.jitter,
            is_ours=run.is_ours,
        ) as endpoint:
            return await _Work(run, endpoint).until_over()


class _Work:
    """One run under way."""

    def __init__(self, run: AgentRun, endpoint: Model) -> None:
        self.run = run
        self.model = endpoint
        self.talk = Conversation.start(opening(run.task, run.settings), run.history)
        self.deadline = run.monotonic() + run.settings.timeout_s - self.talk.spent_s
        self.tools = Toolbox(run.settings.tools, run.settings.max_completion_tokens)
        # No method of this object: a circle would keep all that a rollout held until a full garbage collection.
        self.remaining_s = partial(_remaining_s, run.monotonic, self.deadline)
        self.turns = TurnTaker(run, self.tools, self.remaining_s)
        self.request = _request(run.settings, self.tools)

    async def until_over(self) -> AgentExit:
        """Take turn after turn."""
        over = limits.reached(self.talk, self.run.settings, self.remaining_s())
        while over is None:
            await self.run.recorder.asking()
            answer = await self.model.ask(
                self.talk.messages, self.talk.pending_digest(), self.request, self.deadline
            )
            over = await self.act(answer) or limits.reached(self.talk, self.run.settings, self.remaining_s())
        if not self.talk.turns:
            raise errors.NoLlmCall(
                f"the run ended without one answer from the model: {over.message}",
                hint="check that the endpoint answers, and that the prompt fits its context window",
            )
        return over

    async def act(self, answer: Answer) -> AgentExit | None:
        """Record what came of the request; returns why the run is over, if that alone says so."""
        if isinstance(answer.got, Trouble):
            return await self.give_up(answer.got, answer)
        return await self.take_turn(answer.got, answer)

    async def take_turn(self, reply: Reply, answer: Answer) -> AgentExit | None:
        """Do what the reply says and make the step durable, even when the sandbox did not survive it."""
        name = f"turn-{self.talk.turns + 1:04d}"
        await self.run.recorder.answered(name, answer.calls)
        started = self.run.monotonic()
        turn = await self.turns.take(reply, remind=self.talk.silent_in_a_row == 0)
        tool_ms = round((self.run.monotonic() - started) * 1000)
        self.talk.add(reply.message, *turn.messages)
        await self.record(self.step(name, turn, answer, tool_ms))
        if turn.lost:
            raise turn.lost
        if turn.destroyed:
            return AgentExit(
                reason=ExitReason.AGENT_DESTROYED_SANDBOX,
                message=f"a command of the agent broke its sandbox: {turn.destroyed}",
            )
        return None

    async def give_up(self, trouble: Trouble, answer: Answer) -> AgentExit:
        """Record the requests that got no answer; returns the agent's own reason or raises the failure."""
        name = f"unanswered-{self.talk.unanswered + 1:04d}"
        await self.run.recorder.answered(name, answer.calls)
        self.talk.count(Step(name=name, messages=[], calls=answer.calls))
        if answer.out_of_time:
            return AgentExit(
                reason=ExitReason.WALL_TIME, message="the time ended while the model was answering"
            )
        if trouble.kind is Kind.CONTEXT_WINDOW and self.talk.turns:
            return AgentExit(
                reason=ExitReason.CONTEXT_WINDOW,
                message=f"the conversation no longer fits the model's context: {trouble.text}",
            )
        raise self.model.failure(trouble, answered=self.talk.turns > 0)

    def step(self, name: str, turn: Turn, answer: Answer, tool_ms: int) -> Step:
        """Return the step that this turn adds to the record."""
        return Step(
            name=name,
            messages=list(self.talk.unrecorded),
            calls=answer.calls,
            tool_calls=turn.tool_calls,
            format_errors=turn.format_errors,
            command_timeouts=turn.command_timeouts,
            truncated_observations=turn.truncated,
            tool_ms=tool_ms,
            lost=turn.lost is not None,
        )

    async def record(self, step: Step) -> None:
        """Return once the step is durable; only then may the next request go out."""
        await self.run.recorder.record(step)
        self.talk.count(step)


def _remaining_s(monotonic: Callable[[], float], deadline: float) -> float:
    return deadline - monotonic()


def _request(settings: AgentSettings, tools: Toolbox) -> dict[str, Any]:
    """Return the request's fields beside model and messages; exactly one token limit, as some servers insist on."""
    fields: dict[str, Any] = {
        "tools": tools.schemas(),
        "max_completion_tokens": settings.max_completion_tokens,
    }
    if settings.temperature is not None:
        fields["temperature"] = settings.temperature
    if settings.top_p is not None:
        fields["top_p"] = settings.top_p
    return fields
