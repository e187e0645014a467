"""What a dead worker's agent left can be gone on with only where its last step is whole."""

from __future__ import annotations

from typing import Any

from orchestrator.agents.base import LlmCall, Step
from orchestrator.rollout import transcript


def left(*steps: Step, answered: tuple[str, ...] = ()) -> list[Step] | None:
    """Store steps and answers as rows, and restore from them."""
    stored: list[dict[str, Any]] = []
    for step in steps:
        row = transcript.step_row(step)
        stored.append({name: getattr(row, name) for name in row.__slots__} | {"output": _json(row.output)})
    calls = [{"step": name, **_call()} for name in (*(step.name for step in steps), *answered)]
    return transcript.restored(stored, calls)


def _json(value: object) -> str:
    from store.rows import canonical_json

    return canonical_json(value)


def _call(outcome: str = "ok") -> dict[str, Any]:
    call = LlmCall(outcome=outcome, request_sha256="r", prompt_tokens=3)
    return {name: getattr(call, name) for name in call.__slots__}


def turn(number: int, **more: Any) -> Step:
    message = {"role": "assistant", "content": str(number)}
    return Step(name=f"turn-{number:04d}", messages=[message], calls=[], tool_calls=1, **more)


def test_whole_steps_come_back_with_their_messages_counts_and_calls():
    found = left(turn(1), turn(2))
    assert found is not None
    assert [(step.name, step.messages[0]["content"], step.tool_calls) for step in found] == [
        ("turn-0001", "1", 1),
        ("turn-0002", "2", 1),
    ]
    assert [step.calls[0].prompt_tokens for step in found] == [3, 3]


def test_an_answer_without_its_step_may_have_been_acted_upon():
    assert left(turn(1), answered=("turn-0002",)) is None


def test_a_step_in_which_the_sandbox_did_not_answer_is_no_step_to_go_on_after():
    assert left(turn(1), turn(2, lost=True)) is None


def test_a_request_without_an_answer_changes_nothing():
    found = transcript.restored([], [{"step": "unanswered-0001", **_call("refused")}])
    assert found is not None
    assert [(step.name, step.messages) for step in found] == [("unanswered-0001", [])]
