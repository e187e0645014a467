"""What a request without an answer means: whether it may be repeated, and what was wrong."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """What can be done about a request that got no answer."""

    RETRY = "retry"
    """Refused before anything can have been sampled, and the same request may succeed soon."""
    REFUSED = "refused"
    """Refused, and the same request will be refused again."""
    BROKEN = "broken"
    """It was sent, and may have been sampled: never repeated."""
    MALFORMED = "malformed"
    """Answered with status 200 and something that is no chat completion; perhaps sampled, never repeated."""
    CONTEXT_WINDOW = "context_window"
    SESSION_GONE = "session_gone"


@dataclass(frozen=True, kw_only=True, slots=True)
class Trouble:
    """One request without an answer."""

    kind: Kind
    text: str
    status: int | None = None
    retry_after_s: float = 0.0

    @property
    def outcome(self) -> str:
        """The call's `outcome` as it is recorded."""
        match self.kind:
            case Kind.BROKEN:
                return "ambiguous"
            case Kind.MALFORMED:
                return "error"
            case Kind.RETRY | Kind.REFUSED | Kind.CONTEXT_WINDOW | Kind.SESSION_GONE:
                return "refused"


# AReaL answers an overlong prompt with a 500 whose text has this form; see its proxy_rollout_server.py.
_SURE = re.compile(
    r"len of prompt tokens \d+ exceeds max_total_tokens \d+"
    r"|context_length_exceeded"
    r"|maximum context length"
    r"|model's context length"
    r"|longer than the maximum model length",
    re.IGNORECASE,
)
# Wordings of OpenAI, vLLM, SGLang, TGI, llama.cpp, Anthropic and Gemini, believed only beside a 4xx status.
_LIKELY = re.compile(
    _SURE.pattern + r"|context[ _](?:window|size|limit)"
    r"|input length"
    r"|prompt is too long"
    r"|prompt (?:\([^)]*\) )?is longer than"
    r"|max_(?:completion_)?tokens must be at least 1, got -?\d+"
    r"|`inputs` (?:tokens|must have less than)"
    r"|input token count .{0,40}exceeds",
    re.IGNORECASE,
)


def of_status(status: int, body: str, retry_after: str | None = None) -> Trouble:
    """Read an error status and its body."""
    text = f"status {status}: {_said(body)}"
    kind = _kind(status, body)
    wait_s = float(retry_after) if retry_after and re.fullmatch(r"\d+(\.\d+)?", retry_after) else 0.0
    return Trouble(kind=kind, text=text, status=status, retry_after_s=wait_s)


def _kind(status: int, body: str) -> Kind:
    if status in {401, 403, 410} or (status == 404 and re.search(r"\bsession\b", body, re.IGNORECASE)):
        return Kind.SESSION_GONE
    if status in {400, 413, 422} and _LIKELY.search(body):
        return Kind.CONTEXT_WINDOW
    if status == 500 and _SURE.search(body):
        return Kind.CONTEXT_WINDOW
    if status == 503 or (status == 429 and "insufficient_quota" not in body):
        return Kind.RETRY
    return Kind.REFUSED if status < 500 and status != 408 else Kind.BROKEN


def of_connection(error: BaseException) -> Trouble:
    """Read an error of the HTTP client.

    Its exceptions come from httpx or httpx2, whichever the installed openai package stands on; names are equal.
    """
    names = [type(cause).__name__ for cause in _causes(error)]
    text = _innermost(error)
    if {"ConnectError", "ConnectTimeout", "PoolTimeout"} & set(names):
        return Trouble(kind=Kind.RETRY, text=f"no connection: {text}")
    if {"UnsupportedProtocol", "LocalProtocolError", "InvalidURL", "TooManyRedirects"} & set(names):
        return Trouble(kind=Kind.REFUSED, text=f"the request could not be sent: {text}")
    return Trouble(kind=Kind.BROKEN, text=f"the connection broke after the request was sent: {text}")


def _causes(error: BaseException) -> list[BaseException]:
    chain: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and len(chain) < 10:
        chain.append(at)
        at = at.__cause__ or at.__context__
    return chain


def _innermost(error: BaseException) -> str:
    last = next((cause for cause in reversed(_causes(error)) if str(cause)), error)
    return f"{type(last).__name__}: {last}"[:300]


def _said(body: str) -> str:
    """Return what the body says, from the usual places of JSON errors, else its first words."""
    try:
        payload: Any = json.loads(body)
    except ValueError:
        payload = None
    if isinstance(payload, dict):
        error = payload.get("error", payload.get("detail", payload.get("message")))
        said = error.get("message") if isinstance(error, dict) else error
        if isinstance(said, str) and said:
            return said[:400]
    return " ".join(body.split())[:400] or "no explanation"
