"""Head and tail of any output, whatever the sizes of the pieces it arrives in."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.sandbox.output_capture import OutputCapture


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pieces=st.lists(st.binary(min_size=1, max_size=300), max_size=12), limit=st.integers(0, 400))
async def test_the_first_and_last_bytes_are_kept(pieces, limit):
    reader, writer = os.pipe()
    capture = OutputCapture(reader)
    try:
        capture.begin(limit)
        for piece in pieces:
            os.write(writer, piece)
            capture._on_readable()
        output, total = capture.take()
    finally:
        capture.close()
        os.close(writer)
    whole = b"".join(pieces)
    head = limit - limit // 2
    assert total == len(whole)
    assert output == (whole if len(whole) <= limit else whole[:head] + whole[len(whole) - limit // 2 :])


async def test_what_comes_between_two_commands_counts_for_the_next():
    reader, writer = os.pipe()
    capture = OutputCapture(reader)
    os.write(writer, b"late ")
    capture._on_readable()
    capture.begin(100)
    os.write(writer, b"own")
    assert capture.take() == (b"late own", 8)
    assert capture.take() == (b"", 0)
    os.close(writer)
    assert capture.take() == (b"", 0)
    capture.close()
