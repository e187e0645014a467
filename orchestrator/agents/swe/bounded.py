"""An HTTP client that never takes more of an answer into memory than a chat completion can need."""

from __future__ import annotations

import importlib
from functools import cache
from typing import TYPE_CHECKING, Any

import openai

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

MAX_BYTES = 32_000_000
"""Of one answer, after decompression."""

_OF_THE_TRANSFER = frozenset({"content-encoding", "content-length", "transfer-encoding"})
"""Headers that describe the bytes on the wire, not those of a body that has been read."""


@cache
def certificates() -> ssl.SSLContext:
    """Return what clients check servers with: the HTTP library's own, without regard to the environment; blocking.

    Made once: reading the certificates takes tens of milliseconds, and giving them back happens in garbage collections.
    """
    client = next(base for base in BoundedClient.__mro__ if base.__name__ == "AsyncClient")
    library = importlib.import_module(client.__module__.partition(".")[0])
    found: ssl.SSLContext = library.create_ssl_context(trust_env=False)
    return found


class AnswerTooLarge(Exception):
    """The endpoint sent more than `MAX_BYTES`."""


class NotOurs(Exception):
    """Nothing was sent: somebody else may have the rollout."""


class BoundedClient(openai.DefaultAsyncHttpxClient):
    """Reads every answer itself, up to the limit, and hands it on whole. Sends nothing while `is_ours` says false."""

    def __init__(self, *, is_ours: Callable[[], bool], **options: Any) -> None:  # noqa: ANN401 - the client's own
        super().__init__(**options)
        self._is_ours = is_ours

    async def send(self, request: Any, *, stream: bool = False, **options: Any) -> Any:  # noqa: ANN401 - the types of whichever HTTP library openai is built on
        """Send a request; raises `AnswerTooLarge` or `NotOurs` beside what the client itself raises."""
        if not self._is_ours():
            raise NotOurs
        response = await super().send(request, stream=True, **options)
        body = bytearray()
        try:
            async for part in response.aiter_bytes():
                body += part
                if len(body) > MAX_BYTES:
                    raise AnswerTooLarge(f"the answer is larger than {MAX_BYTES // 1_000_000} MB")
        finally:
            await response.aclose()
        return type(response)(
            response.status_code,
            headers=[(k, v) for k, v in response.headers.multi_items() if k.lower() not in _OF_THE_TRANSFER],
            content=bytes(body),
            request=request,
        )
