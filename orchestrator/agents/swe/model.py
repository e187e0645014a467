"""The model endpoint: one answer at a time, and no request repeated once it may have been sampled."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import openai
from pydantic import SecretStr

from orchestrator import errors
from orchestrator.agents.base import Endpoint, LlmCall
from orchestrator.agents.swe import reply, trouble
from orchestrator.agents.swe.bounded import AnswerTooLarge, BoundedClient, NotOurs, certificates
from orchestrator.agents.swe.trouble import Kind, Trouble
from orchestrator.settings import LlmSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from orchestrator.agents.base import Message

_CONNECT_TIMEOUT_S = 30.0
_DOUBT_S = 0.1
"""Between two looks whether the rollout is known to be ours again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What came of one request."""

    calls: list[LlmCall]
    """The request itself, after the repeats that it took."""
    got: reply.Reply | Trouble
    out_of_time: bool = False
    """The run's time ended while a request was under way."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """An open connection to an endpoint."""

    client: openai.AsyncOpenAI
    endpoint: Endpoint
    llm: LlmSettings
    monotonic: Callable[[], float]
    sleep: Callable[[float], Awaitable[None]]
    jitter: Callable[[], float]
    """A number from 0 to 1 for each pause."""

    async def ask(
        self, messages: list[Message], digest: str, request: dict[str, Any], deadline: float
    ) -> Answer:
        """Send the conversation and return the answer, or why there is none.

        `request` holds the fields beside model and messages; `deadline` is a reading of `monotonic`. Only requests
        that cannot have been sampled are repeated, `connect_retries` times at most.
        """
        calls: list[LlmCall] = []
        while True:
            started = self.monotonic()
            try:
                got, ran_out = await self._once(messages, request, deadline - started)
            except NotOurs:
                await self.sleep(_DOUBT_S)
                continue
            calls.append(self._call(got, digest, started))
            if isinstance(got, reply.Reply):
                return Answer(calls=calls, got=got)
            pause_s = self._pause_s(len(calls) - 1, got)
            again = got.kind is Kind.RETRY and len(calls) <= self.llm.connect_retries
            if not again or self.monotonic() + pause_s >= deadline:
                return Answer(calls=calls, got=got, out_of_time=ran_out)
            await self.sleep(pause_s)

    async def _once(
        self, messages: list[Message], request: dict[str, Any], remaining_s: float
    ) -> tuple[reply.Reply | Trouble, bool]:
        """Send once; the second value is true when the run's time, not the request's own, ran out.

        Raises `NotOurs` when nothing was sent.
        """
        try:
            async with asyncio.timeout(min(self.llm.request_timeout_s, remaining_s)):
                # The library's own word for this path walks through every message on the event loop, and hangs dozens of
                # objects in circles to the client, which wait for a full garbage collection.
                content = await self.client.post(
                    "/chat/completions",
                    cast_to=bytes,
                    body={**request, "model": self.endpoint.model, "messages": messages},
                )
            return reply.parse(content), False
        except TimeoutError:
            ran_out = remaining_s <= self.llm.request_timeout_s
            limit = (
                "the run's time ended" if ran_out else f"no answer within {self.llm.request_timeout_s:g} s"
            )
            return Trouble(kind=Kind.BROKEN, text=limit), ran_out
        except openai.APIStatusError as error:
            body, headers = error.response.text, error.response.headers
            return trouble.of_status(error.status_code, self._clean(body), headers.get("retry-after")), False
        except (AnswerTooLarge, openai.APIConnectionError) as error:
            # Some versions of the client library wrap what is raised inside it.
            cause = error if isinstance(error, AnswerTooLarge) else error.__cause__
            if isinstance(cause, NotOurs):
                raise cause from None
            if isinstance(cause, AnswerTooLarge):
                return Trouble(kind=Kind.BROKEN, text=str(cause)), False
            found = trouble.of_connection(error)
            return Trouble(kind=found.kind, text=self._clean(found.text)), False
        except reply.MalformedReply as error:
            text = f"status 200, but {error}"
            return Trouble(kind=Kind.MALFORMED, text=self._clean(text), status=200), False

    def _pause_s(self, repeats: int, got: Trouble) -> float:
        """Exponential, with jitter over its upper half, at least what the server asks for, at most the cap."""
        grown = min(self.llm.retry_cap_s, self.llm.retry_base_s * 2.0 ** min(repeats, 30))
        return min(self.llm.retry_cap_s, max(grown * (0.5 + self.jitter() / 2), got.retry_after_s))

    def _call(self, got: reply.Reply | Trouble, digest: str, started: float) -> LlmCall:
        duration_ms = round((self.monotonic() - started) * 1000)
        if isinstance(got, Trouble):
            return LlmCall(
                outcome=got.outcome,
                request_sha256=digest,
                http_status=got.status,
                duration_ms=duration_ms,
                error=got.text,
            )
        return LlmCall(
            outcome="ok",
            request_sha256=digest,
            response_id=got.response_id,
            model=got.model,
            http_status=200,
            finish_reason=got.finish_reason,
            prompt_tokens=got.prompt_tokens,
            completion_tokens=got.completion_tokens,
            cached_tokens=got.cached_tokens,
            duration_ms=duration_ms,
        )

    def _clean(self, text: str) -> str:
        """Take the key out of what a server or client said: some servers repeat it."""
        key = self.endpoint.api_key.get_secret_value()
        return reply.well_formed(text.replace(key, "***") if key else text)

    def failure(self, found: Trouble, *, answered: bool) -> errors.Failure:
        """Return the error that ends the attempt.

        What a new attempt cannot cure (refused outright before the first answer) draws on no retry budget.
        """
        where = f"{shown_url(self.endpoint.base_url)} (model {self.endpoint.model!r})"
        if found.kind is Kind.SESSION_GONE:
            return errors.LlmSessionGone(
                f"{where} no longer accepts this rollout's key: {found.text}",
                hint="check the API key; in training the session has ended and only a new rollout gets a new one",
            )
        if found.kind in {Kind.REFUSED, Kind.MALFORMED, Kind.CONTEXT_WINDOW} and not answered:
            return errors.NoLlmCall(
                f"{where} did not serve the first request: {found.text}",
                hint=_HINTS.get(found.status or 0, _HINT),
            )
        return errors.LlmUnreachable(f"{where} gave no answer: {found.text}", hint=_HINT)


_HINT = "check that the base URL is right (often it ends in /v1), that the server runs, and the model name"
_HINTS = {
    404: "check the base URL (often it ends in /v1) and the model name; the server knows one of them not",
    400: "the server refuses the request as it is: check the model name and that it supports tools",
    422: "the server refuses the request as it is: check the model name and that it supports tools",
}


def shown_url(url: str) -> str:
    """Return a URL without the user name, password and query that it may hold."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()


@asynccontextmanager
async def connect(
    endpoint: Endpoint,
    llm: LlmSettings,
    monotonic: Callable[[], float],
    *,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    jitter: Callable[[], float] = random.random,
    is_ours: Callable[[], bool] = lambda: True,
) -> AsyncIterator[Model]:
    """Open a model and close it again; raises `errors.NoLlmCall` for an address or key that no request can use.

    While `is_ours` says false, asked just before each request goes out, none does.
    """
    key = endpoint.api_key.get_secret_value()
    _check(endpoint.base_url, key)
    verify = await asyncio.to_thread(certificates)
    # Proxies named by this process's environment are not part of the settings.
    http_client = BoundedClient(is_ours=is_ours, trust_env=False, verify=verify)
    async with openai.AsyncOpenAI(
        base_url=endpoint.base_url,
        api_key=key or "EMPTY",
        max_retries=0,
        timeout=openai.Timeout(None, connect=_CONNECT_TIMEOUT_S),
        # A connection of its own for each request: a reused one that the server has just closed looks exactly like
        # one that broke after the request was sent, and such a request must never be repeated.
        default_headers={"Connection": "close"},
        http_client=http_client,
    ) as client:
        yield Model(
            client=client, endpoint=endpoint, llm=llm, monotonic=monotonic, sleep=sleep, jitter=jitter
        )


def warm() -> None:
    """Load, blocking, all that the first request would load on somebody's event loop: by a request that is refused."""

    async def ask(port: int) -> None:
        nobody = Endpoint(base_url=f"http://127.0.0.1:{port}", model="none", api_key=SecretStr("none"))
        async with connect(nobody, LlmSettings(), time.monotonic) as model:
            with contextlib.suppress(openai.APIConnectionError):
                await model.client.post(
                    "/chat/completions", cast_to=bytes, body={"model": "none", "messages": []}
                )

    with socket.socket() as closed:  # bound and not listening: whoever connects is refused
        closed.bind(("127.0.0.1", 0))
        asyncio.run(ask(closed.getsockname()[1]))


def _check(base_url: str, key: str) -> None:
    try:
        parts = urlsplit(base_url)
        usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise errors.NoLlmCall(
            f"{base_url!r} is not the address of a model endpoint",
            hint="give a base URL such as http://127.0.0.1:8000/v1",
        )
    if not (key.isascii() and key.isprintable()):
        raise errors.NoLlmCall(
            "the API key holds characters that no HTTP header can carry",
            hint="look for a line break or blanks around the key where it is set",
        )
