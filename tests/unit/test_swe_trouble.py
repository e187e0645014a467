"""What error answers mean: the wordings are those of the servers' own sources and documentation."""

from __future__ import annotations

import pytest

from orchestrator.agents.swe.reply import MalformedReply, parse
from orchestrator.agents.swe.trouble import Kind, of_status

OVERFLOWS = {
    "OpenAI": (400, '{"error": {"message": "...", "code": "context_length_exceeded"}}'),
    "vLLM": (
        400,
        '{"object": "error", "message": "This model\'s maximum context length is 4096 tokens. You asked for 5000."}',
    ),
    "vLLM, prompt alone": (
        400,
        '{"message": "The decoder prompt (length 9000) is longer than the maximum model length of 8192."}',
    ),
    "vLLM, nothing left": (400, '{"message": "max_tokens must be at least 1, got -12."}'),
    "SGLang": (
        400,
        '{"message": "The input (9000 tokens) is longer than the model\'s context length (8192 tokens)."}',
    ),
    "SGLang, with completion": (
        400,
        '{"message": "Requested token count exceeds the model\'s maximum context length of 8192 tokens."}',
    ),
    "AReaL": (500, '{"detail": "len of prompt tokens 441 exceeds max_total_tokens 200"}'),
    "AReaL, streaming": (
        500,
        '{"detail": "Streaming setup failed: 500: len of prompt tokens 441 exceeds max_total_tokens 200"}',
    ),
    "TGI": (422, '{"error": "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096."}'),
    "llama.cpp": (400, '{"error": {"message": "the request exceeds the available context size"}}'),
    "Anthropic": (400, '{"error": {"message": "prompt is too long: 210000 tokens > 200000 maximum"}}'),
    "input length": (400, '{"message": "Range of input length should be [1, 30720]"}'),
}


@pytest.mark.parametrize(("status", "body"), OVERFLOWS.values(), ids=OVERFLOWS.keys())
def test_an_overlong_prompt_is_recognised(status, body):
    assert of_status(status, body).kind is Kind.CONTEXT_WINDOW


@pytest.mark.parametrize(
    ("status", "body", "kind", "outcome"),
    [
        (429, "slow down", Kind.RETRY, "refused"),
        (429, '{"error": {"code": "insufficient_quota"}}', Kind.REFUSED, "refused"),
        (503, "", Kind.RETRY, "refused"),
        (500, '{"detail": "ValueError: no tools"}', Kind.BROKEN, "ambiguous"),
        (500, "the input length was odd", Kind.BROKEN, "ambiguous"),
        (502, "<html>bad gateway</html>", Kind.BROKEN, "ambiguous"),
        (504, "", Kind.BROKEN, "ambiguous"),
        (408, "", Kind.BROKEN, "ambiguous"),
        (401, '{"detail": "Invalid or expired session API key."}', Kind.SESSION_GONE, "refused"),
        (403, "", Kind.SESSION_GONE, "refused"),
        (410, "", Kind.SESSION_GONE, "refused"),
        (404, '{"detail": "Session abc not found"}', Kind.SESSION_GONE, "refused"),
        (404, '{"error": {"message": "The model `x` does not exist"}}', Kind.REFUSED, "refused"),
        (400, '{"error": {"message": "Unsupported parameter: temperature"}}', Kind.REFUSED, "refused"),
        (422, "", Kind.REFUSED, "refused"),
    ],
)
def test_a_status_says_whether_a_request_may_be_repeated(status, body, kind, outcome):
    found = of_status(status, body)
    assert (found.kind, found.outcome) == (kind, outcome)
    assert str(status) in found.text


def test_the_servers_own_words_are_kept_and_its_wish_to_wait_too():
    found = of_status(429, '{"error": {"message": "too many"}}', "7")
    assert found.text == "status 429: too many"
    assert found.retry_after_s == 7
    assert of_status(429, "", "Wed, 21 Oct 2026 07:28:00 GMT").retry_after_s == 0


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>login</html>",
        b"[]",
        b"{}",
        b'{"choices": []}',
        b'{"choices": [{}]}',
        b'{"choices": [{"message": null}]}',
        b'{"choices": [{"message": {"role": "user", "content": "x"}}]}',
        b'{"choices": [{"message": {"tool_calls": "bash"}}]}',
        b'{"choices": [{"message": {"content": "half',
        b"\xff\xfe\x00",
    ],
    ids=repr,
)
def test_a_200_that_is_no_completion_is_malformed(body):
    with pytest.raises(MalformedReply):
        parse(body)


def test_nulls_go_and_everything_else_stays():
    got = parse(
        b'{"id": "c1", "choices": [{"finish_reason": "stop", "message": {"role": "assistant", "content": null,'
        b' "reasoning_content": "hm", "tool_calls": null, "details": {"a": null, "b": [null, 1]}}}],'
        b' "usage": {"prompt_tokens": 3, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 2}}}'
    )
    assert got.message == {"role": "assistant", "reasoning_content": "hm", "details": {"b": [None, 1]}}
    assert (got.prompt_tokens, got.completion_tokens, got.cached_tokens) == (3, 4, 2)
    assert got.tool_calls == []


def test_a_lone_surrogate_cannot_break_the_next_request():
    got = parse(b'{"choices": [{"message": {"content": "x \\ud83d y \\ud83d\\ude00"}}]}')
    assert got.message["content"] == "x \ufffd y \U0001f600"


def test_usage_that_makes_no_sense_counts_as_nothing():
    got = parse(b'{"choices": [{"message": {"content": ""}}], "usage": {"prompt_tokens": "many"}}')
    assert got.prompt_tokens == 0
