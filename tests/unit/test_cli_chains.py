from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from orchestrator.cli import conduct
from orchestrator.cli.chains import Chains, newest_of_each
from orchestrator.rollout import Request


def asked(samples: int = 1) -> list[Request]:
    task, settings = SimpleNamespace(sha256="task"), SimpleNamespace(sha256="config")
    return [
        Request(task=cast("Any", task), settings=cast("Any", settings), run_id="run", sample=sample)
        for sample in range(samples)
    ]


def row(rollout_id: str, state: str, retry_no: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "id": rollout_id, "task_sha256": "task", "config_sha256": "config", "sample": 0, "retry_no": retry_no,
        "state": state, "failure_class": "internal" if state == "failed" else None, **more,
    }  # fmt: skip


def numbers(chains: Chains) -> list[tuple[int, int, str | None]]:
    return [(request.sample, request.retry_no, request.parent_id) for request in chains.missing]


def test_the_row_with_the_highest_retry_number_is_the_newest_in_any_order():
    rows = [row("b", "failed", 1), row("c", "created", 2), row("a", "failed", 0)]
    assert [found["id"] for found in newest_of_each(rows).values()] == ["c"]
    assert [found["id"] for found in newest_of_each(reversed(rows)).values()] == ["c"]


def test_only_samples_that_the_run_does_not_hold_are_missing():
    chains = Chains(asked(3), [row("a", "released"), row("b", "created", sample=2)], retries=1)
    assert numbers(chains) == [(1, 0, None)]
    assert chains.ids == ["a", "b"]
    assert not chains.is_over


@pytest.mark.parametrize("other", [{"task_sha256": "other"}, {"config_sha256": "other"}, {"sample": 1}])
def test_a_row_of_another_task_configuration_or_sample_answers_nothing(other: dict[str, Any]):
    chains = Chains(asked(), [row("a", "released", **other)], retries=1)
    assert numbers(chains) == [(0, 0, None)]


def test_a_failed_sample_is_missing_and_its_successor_names_it_as_parent():
    chains = Chains(asked(), [row("b", "failed", 1), row("a", "failed", 0)], retries=1)
    assert numbers(chains) == [(0, 2, "b")]
    assert not chains.is_over


def test_without_retries_a_failed_sample_is_an_answer():
    chains = Chains(asked(), [row("a", "failed")], retries=0)
    assert numbers(chains) == []
    assert chains.is_over
    assert chains.ids == ["a"]
    assert chains.successor("a", "internal") is None


def test_an_invalid_task_is_never_tried_again():
    chains = Chains(asked(), [row("a", "failed", failure_class="task_invalid")], retries=5)
    assert numbers(chains) == []
    assert chains.is_over
    assert chains.successor("a", "task_invalid") is None


def test_what_a_person_cancelled_is_tried_again_by_the_next_call_only():
    running = Chains(asked(), [row("a", "agent_running")], retries=1)
    assert running.successor("a", "cancelled") is None
    following = Chains(asked(), [row("a", "failed", failure_class="cancelled")], retries=1)
    assert numbers(following) == [(0, 1, "a")]


def test_successors_in_one_call_are_counted_together_with_the_one_made_at_its_beginning():
    chains = Chains(asked(), [row("a", "failed")], retries=2)
    assert numbers(chains) == [(0, 1, "a")]
    chains.catch_up([row("a", "failed"), row("b", "failed", 1)])
    following = chains.successor("b", "internal")
    assert following is not None
    assert (following.retry_no, following.parent_id) == (2, "b")
    chains.catch_up([row("c", "failed", 2), row("b", "failed", 1)])
    assert chains.successor("c", "internal") is None
    assert chains.ids == ["c"]


def test_only_the_newest_rollout_of_a_sample_that_was_asked_for_has_a_successor():
    chains = Chains(asked(), [row("a", "created")], retries=3)
    assert chains.successor("stranger", "internal") is None
    assert chains.successor("a", None) is None
    chains.catch_up([row("b", "created", 1)])
    assert chains.successor("a", "internal") is None
    assert chains.has(row("b", "created", 1))
    assert not chains.has(row("b", "created", 1, sample=7))


def test_a_sample_is_counted_once_whatever_its_successors_are_called():
    chains = Chains(asked(), [row("a", "created")], retries=1)
    chains.catch_up([row("b", "created", 1)])
    assert chains.counted_as("a") == chains.counted_as("b") == "a"
    assert chains.counted_as("stranger") == "stranger"


def test_a_failed_rollout_of_an_earlier_call_does_not_stand_for_its_successor():
    chains = Chains(asked(), [row("a", "failed")], retries=1)
    chains.catch_up([row("b", "created", 1)])
    assert chains.counted_as("b") == "b"


def test_rollouts_of_a_task_that_was_changed_since_are_told(capsys: pytest.CaptureFixture[str]):
    tasks: Any = [
        SimpleNamespace(instance_id="a", sha256="new"),
        SimpleNamespace(instance_id="b", sha256="b"),
    ]
    held: Any = [
        {"instance_id": "a", "task_sha256": "new"}, {"instance_id": "a", "task_sha256": "old"},
        {"instance_id": "b", "task_sha256": "b"}, {"instance_id": "elsewhere", "task_sha256": "c"},
    ]  # fmt: skip
    conduct._tell_of_edits(held, tasks)
    said = capsys.readouterr().err
    assert (
        said == "1 rollouts of this run are of an earlier version of their task (a) and do not count here\n"
    )
    conduct._tell_of_edits(held[::2], tasks)
    assert capsys.readouterr().err == ""
