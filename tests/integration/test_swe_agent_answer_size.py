"""An endpoint cannot fill this process's memory with one answer."""

from __future__ import annotations

import gzip
import json

import pytest

from orchestrator import errors
from orchestrator.agents.swe import bounded
from orchestrator.testing.loopback import LoopbackServer, Response
from orchestrator.testing.sandbox import FakeSandbox
from orchestrator.testing.tryout import TryOut

SUBMIT = {
    "id": "1",
    "object": "chat.completion",
    "created": 0,
    "model": "m",
    "choices": [
        {
            "index": 0,
            "finish_reason": "tool_calls",
            "message": {
                "role": "assistant",
                "content": "é" * 100,
                "tool_calls": [
                    {"id": "c", "type": "function", "function": {"name": "submit", "arguments": "{}"}}
                ],
            },
        }
    ],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}
ZIPPED = {"content-encoding": "gzip", "content-type": "application/json"}


async def ask(tmp_path, response: Response):
    async def answer(_request: object) -> Response:
        return response

    server = LoopbackServer(answer)
    await server.open()
    try:
        return await TryOut(sandbox=FakeSandbox(tmp_path)).run(f"http://127.0.0.1:{server.port}/v1")
    finally:
        await server.close()


@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize("zipped", [False, True], ids=["plain", "compressed"])
async def test_an_answer_over_the_limit_is_an_endpoint_that_gave_none(tmp_path, monkeypatch, status, zipped):
    monkeypatch.setattr(bounded, "MAX_BYTES", 2_000_000)
    body = json.dumps({**SUBMIT, "more": "x" * 2_000_000}).encode()
    sent = (
        Response(status=status, body=gzip.compress(body), headers=ZIPPED)
        if zipped
        else Response(status=status, body=body)
    )
    with pytest.raises(errors.LlmUnreachable, match="larger than 2 MB"):
        await ask(tmp_path, sent)


@pytest.mark.parametrize("zipped", [False, True], ids=["plain", "compressed"])
async def test_an_answer_within_the_limit_is_read_whole(tmp_path, zipped):
    body = json.dumps(SUBMIT).encode()
    sent = Response(body=gzip.compress(body), headers=ZIPPED) if zipped else Response(body=body)
    over = await ask(tmp_path, sent)
    assert over.reason is errors.ExitReason.SUBMITTED
