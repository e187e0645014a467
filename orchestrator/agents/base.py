"""What every agent promises: edit the repository through the model, record each step, say why it ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from pydantic import SecretStr

    from orchestrator.errors import ExitReason
    from orchestrator.sandbox.base import Sandbox
    from orchestrator.settings import AgentSettings

Message = dict[str, Any]
"""One chat message exactly as it went over the wire; never rewritten, because trainers match prefixes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentTask:
    """The part of a task an agent may know: nothing here comes from tests, patches or grading."""

    instance_id: str
    problem_statement: str
    workdir: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """An OpenAI-compatible endpoint and the model to ask for. The key lives in memory only."""

    base_url: str
    model: str
    api_key: SecretStr


@dataclass(frozen=True, kw_only=True, slots=True)
class LlmCall:
    """One request to the model, answered or not. Times are milliseconds of elapsed time."""

    kind: str = "turn"
    outcome: str
    """ok | refused (cannot have been sampled) | ambiguous (may have been sampled) | error"""
    request_sha256: str
    """Over the previous call's digest and this request's new messages: a chain, so that history is never repeated."""
    response_id: str | None = None
    model: str | None = None
    http_status: int | None = None
    finish_reason: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    duration_ms: int = 0
    error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One turn: the messages it added to the conversation (those before the first reply included) and its counts.

    One without messages is a request that got no answer.
    """

    name: str
    """`turn-0001`, `turn-0002`, ...; unique within an attempt."""
    messages: list[Message]
    calls: list[LlmCall]
    tool_calls: int = 0
    format_errors: int = 0
    command_timeouts: int = 0
    truncated_observations: int = 0
    tool_ms: int = 0
    lost: bool = False
    """The sandbox did not answer in this turn, so that its observations are not the agent's doing: nobody goes on after it."""


class Recorder(Protocol):
    """Stores what an agent did. When a method returns, the fact is durable."""

    async def asking(self) -> None:
        """Store that the model is asked now, before a request leaves; only the first time counts.

        Whoever comes after a dead worker tells from it whether the caller's session may hold an answer already.
        """
        ...

    async def answered(self, step: str, calls: list[LlmCall]) -> None:
        """Store the calls of a step before anything is done that they ask for.

        A later worker tells from it whether the sandbox may be ahead of the transcript: then calls stand without
        their step.
        """
        ...

    async def record(self, step: Step) -> None:
        """Store one completed step; its calls are stored already."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentRun:
    """What an agent is given for one attempt."""

    task: AgentTask
    sandbox: Sandbox
    endpoint: Endpoint
    settings: AgentSettings
    recorder: Recorder
    monotonic: Callable[[], float]
    """Seconds; measures the wall-time limit."""
    history: list[Step] = field(default_factory=list)
    """Steps of this attempt that are already durable: the agent continues after the last one."""
    is_ours: Callable[[], bool] = lambda: True
    """False while somebody else may have the rollout: no model may be asked then. A worker that stood still does not
    know; it waits until it does, or is cancelled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentExit:
    """How the agent ended, with a sentence for people."""

    reason: ExitReason
    message: str


class Agent(Protocol):
    """One kind of agent. Infrastructure trouble raises a `Failure`; everything else is an `AgentExit`."""

    async def run(self, run: AgentRun) -> AgentExit:
        """Work on the task until done or out of a limit.

        Raises `errors.LlmUnreachable`, `errors.LlmSessionGone`, `errors.NoLlmCall` or `errors.SandboxLost`.
        """
        ...
