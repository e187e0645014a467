"""A small HTTP/1.1 server on the loopback interface: enough for one JSON request after another, and for faults."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

_HEAD_LIMIT = 64 * 1024
_BODY_LIMIT = 64 * 1024 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One request; header names are in lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Response:
    """One response. A `body` of None closes the connection without a word."""

    status: int = 200
    body: bytes | None = b""
    headers: dict[str, str] = field(default_factory=dict)


class BadRequest(Exception):
    """The bytes are no HTTP request that this server understands."""


class LoopbackServer:
    """Serves `answer` on 127.0.0.1 while it is open; closing it ends every request that is still under way."""

    def __init__(self, answer: Callable[[Request], Awaitable[Response]], port: int = 0) -> None:
        self._answer = answer
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self.port = port
        """0 until `open` when any free port will do."""

    async def open(self) -> None:
        """Start to listen."""
        self._server = await asyncio.start_server(
            self._accept, "127.0.0.1", self.port, limit=_HEAD_LIMIT, backlog=512
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stop listening, drop every connection and wait until all are gone."""
        if self._server is None:
            return
        self._server.close()
        for connection in list(self._connections):
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await self._server.wait_closed()
        self._server = None

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._serve_one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, BadRequest):
            pass  # the client hung up, or does not speak HTTP: there is nobody to tell
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; false when the connection is not to be used again."""
        request = await read_request(reader)
        if request is None:
            return False
        response = await self._answer(request)
        if response.body is None:
            return False
        again = request.headers.get("connection", "").lower() != "close"
        writer.write(_wire(response, again=again))
        await writer.drain()
        return again


async def read_request(reader: asyncio.StreamReader) -> Request | None:
    """Read one request, or None when the client has nothing more to ask; raises `BadRequest`."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise BadRequest("half a request") from None
        return None
    except asyncio.LimitOverrunError:
        raise BadRequest("headers too long") from None
    first, *lines = head.decode("latin-1").split("\r\n")
    parts = first.split(" ")
    if len(parts) != 3:
        raise BadRequest(f"no request line: {first[:100]!r}")
    headers = {
        name.strip().lower(): value.strip()
        for name, found, value in (line.partition(":") for line in lines)
        if found
    }
    length = headers.get("content-length", "0")
    if not length.isdigit() or int(length) > _BODY_LIMIT or "transfer-encoding" in headers:
        raise BadRequest("a body needs a length, within reason")
    body = await reader.readexactly(int(length))
    return Request(method=parts[0], path=parts[1], headers=headers, body=body)


def _wire(response: Response, *, again: bool) -> bytes:
    body = response.body or b""
    try:
        phrase = HTTPStatus(response.status).phrase
    except ValueError:
        phrase = "Unknown"
    headers = {
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "Connection": "keep-alive" if again else "close",
        **response.headers,
    }
    lines = [f"HTTP/1.1 {response.status} {phrase}", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body
