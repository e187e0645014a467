"""The conversation with the model: it only ever grows, and a request is the previous one plus new messages."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from orchestrator.agents.swe import reply
from orchestrator.agents.swe.tools.submit import SUBMITTED

if TYPE_CHECKING:
    from orchestrator.agents.base import AgentTask, LlmCall, Message, Step
    from orchestrator.settings import AgentSettings


def request_digest(previous: str, messages: list[Message]) -> str:
    """Return the digest of a request: sha256 over the previous request's digest and the messages added since.

    `previous` is empty for the first request. Messages are taken as compact JSON with sorted keys, so the digest
    does not depend on how a store keeps them.
    """
    added = json.dumps(messages, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    return hashlib.sha256(f"{previous}\n{added}".encode()).hexdigest()


def opening(task: AgentTask, settings: AgentSettings) -> list[Message]:
    """Return the messages before the first reply: system prompt and task, placeholders filled in one pass."""
    values = {
        "workdir": task.workdir,
        "problem_statement": task.problem_statement,
        "instance_id": task.instance_id,
    }
    names = "|".join(values)
    text = re.sub(rf"\{{({names})\}}", lambda found: values[found.group(1)], settings.instance_prompt)
    return [
        {"role": "system", "content": reply.well_formed(settings.system_prompt)},
        {"role": "user", "content": reply.well_formed(text)},
    ]


@dataclass(kw_only=True, slots=True)
class Conversation:
    """Every message so far, and what the limits need to know about the turns behind them."""

    messages: list[Message]
    digest: str = ""
    """Of the last answered request."""
    unsent: list[Message] = field(default_factory=list)
    """The tail of `messages` that no answered request has carried yet."""
    unrecorded: list[Message] = field(default_factory=list)
    """The tail of `messages` that no durable step holds yet."""
    turns: int = 0
    unanswered: int = 0
    """Steps that recorded only requests without an answer."""
    unusable_in_a_row: int = 0
    timeouts_in_a_row: int = 0
    silent_in_a_row: int = 0
    last_tokens: int = 0
    """Prompt and completion tokens of the last turn."""
    submitted: bool = False
    spent_s: float = 0.0
    """Time of the steps of an earlier worker, as far as they say."""

    @classmethod
    def start(cls, first: list[Message], history: list[Step]) -> Conversation:
        """Return the conversation that continues after `history`, or one that begins with `first`."""
        if not any(step.messages for step in history):
            fresh = cls(messages=list(first), unsent=list(first), unrecorded=list(first))
            fresh.unanswered = len(history)
            return fresh
        talk = cls(messages=[])
        for step in history:
            talk._replay(step)
        return talk

    def pending_digest(self) -> str:
        """Return the digest of the request that would go out now."""
        return request_digest(self.digest, self.unsent)

    def add(self, *added: Message) -> None:
        """Append messages; nothing before them is ever touched."""
        for message in added:
            if message["role"] == "assistant":
                self.digest, self.unsent = self.pending_digest(), []
            self.messages.append(message)
            self.unsent.append(message)
            self.unrecorded.append(message)

    def count(self, step: Step) -> None:
        """Take a recorded step into the counts that limits look at."""
        if not step.messages:
            self.unanswered += 1
            return
        self.unrecorded = []
        self.turns += 1
        unusable = step.format_errors > 0 and step.tool_calls <= step.format_errors
        self.unusable_in_a_row = self.unusable_in_a_row + 1 if unusable else 0
        self.timeouts_in_a_row = (
            self.timeouts_in_a_row + step.command_timeouts if step.command_timeouts else 0
        )
        self.silent_in_a_row = (
            self.silent_in_a_row + 1 if not step.tool_calls and not step.format_errors else 0
        )
        self.last_tokens = _tokens(step.calls)
        self.submitted = any(
            message.get("role") == "tool" and message.get("content") == SUBMITTED for message in step.messages
        )

    def _replay(self, step: Step) -> None:
        self.add(*step.messages)
        self.count(step)
        self.spent_s += (sum(call.duration_ms for call in step.calls) + step.tool_ms) / 1000


def _tokens(calls: list[LlmCall]) -> int:
    return next(
        (call.prompt_tokens + call.completion_tokens for call in reversed(calls) if call.outcome == "ok"), 0
    )
