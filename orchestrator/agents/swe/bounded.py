"""An HTTP client that never takes more of an answer into memory than a chat completion can need."""

from __future__ import annotations

from typing import Any

import openai

MAX_BYTES = 32_000_000
"""Of one answer, after decompression."""

_OF_THE_TRANSFER = frozenset({"content-encoding", "content-length", "transfer-encoding"})
"""Headers that describe the bytes on the wire, not those of a body that has been read."""


class AnswerTooLarge(Exception):
    """The endpoint sent more than `MAX_BYTES`."""


class BoundedClient(openai.DefaultAsyncHttpxClient):
    """Reads every answer itself, up to the limit, and hands it on whole."""

    async def send(self, request: Any, *, stream: bool = False, **options: Any) -> Any:  # noqa: ANN401 - the types of whichever HTTP library openai is built on
        """Send a request; raises `AnswerTooLarge` beside what the client itself raises."""
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
