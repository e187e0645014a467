from __future__ import annotations

import logging
from itertools import pairwise

import pytest

from orchestrator.entry.watch import SYSTEMIC_EXIT, Preflight, PreflightFailed, Watch
from orchestrator.settings import TrainingSettings
from store.errors import StoreUnreachable


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def critical(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.CRITICAL]


def test_a_cause_that_hits_every_rollout_is_said_once_a_minute_with_count_and_next_step(
    clock: Clock, caplog: pytest.LogCaptureFixture
):
    watch = Watch(clock)
    for _ in range(7):
        watch.dropped("llm_unreachable", "no answer from 10.0.0.1")
    assert critical(caplog) == []
    for _ in range(5):
        watch.dropped("llm_unreachable", "no answer from 10.0.0.1")
        clock.now += 11
    (said,) = critical(caplog)
    assert said.startswith("8 rollouts in a row without a reward (llm_unreachable 8)")
    assert "no answer from 10.0.0.1" in said
    assert "look whether the model endpoint runs" in said
    clock.now += 60
    watch.dropped("sandbox_lost", "gone")
    assert len(critical(caplog)) == 2
    assert "llm_unreachable 12, sandbox_lost 1" in critical(caplog)[1]


def test_one_valid_rollout_in_between_makes_it_a_coincidence(clock: Clock, caplog: pytest.LogCaptureFixture):
    watch = Watch(clock)
    for _ in range(5):
        for _ in range(7):
            watch.dropped("sandbox_lost", "gone")
        watch.valid()
    assert critical(caplog) == []


def test_what_hits_every_rollout_for_certain_is_said_at_once(clock: Clock, caplog: pytest.LogCaptureFixture):
    Watch(clock).dropped("preflight", "wrong password", "correct ROLLOUTS_DATABASE_URL", systemic=True)
    (said,) = critical(caplog)
    assert said.endswith("wrong password; next: correct ROLLOUTS_DATABASE_URL")


@pytest.mark.parametrize(("on_systemic", "codes"), [("drop", []), ("exit", [SYSTEMIC_EXIT])])
def test_a_process_without_a_valid_rollout_ends_only_where_that_is_wanted(
    clock: Clock, on_systemic: str, codes: list[int]
):
    left: list[int] = []
    watch = Watch(clock, left.append)
    chosen = TrainingSettings.model_validate({"on_systemic": on_systemic, "exit_after_s": 900})
    watch.end_if_hopeless(chosen)  # nothing was asked for yet
    watch.dropped("internal", "?")
    clock.now += 901
    watch.dropped("internal", "?")
    watch.end_if_hopeless(chosen)
    assert left == [], "two in a row may be a coincidence, however long they took"
    watch.valid()
    for _ in range(8):
        watch.dropped("internal", "?")
    clock.now += 899
    watch.end_if_hopeless(chosen)
    assert left == []
    clock.now += 1
    watch.end_if_hopeless(chosen)
    assert left == codes
    watch.valid()
    clock.now += 10_000
    watch.end_if_hopeless(chosen)
    assert left == codes


async def test_a_failed_preflight_answers_at_once_and_is_tried_again_ever_less(clock: Clock):
    tries: list[float] = []

    async def opening() -> str:
        tries.append(clock.now)
        if len(tries) < 4:
            raise StoreUnreachable("away", hint="start it")
        return "open"

    preflight = Preflight(opening, clock)
    while clock.now < 1006.9:
        with pytest.raises(PreflightFailed, match="away") as refused:
            await preflight.get()
        assert refused.value.hint == "start it"
        clock.now += 0.1
    clock.now = 1007.2
    assert await preflight.get() == "open"
    assert [round(after - before, 1) for before, after in pairwise(tries[:3])] == [1.0, 2.0]
    assert await preflight.get() == "open"
    assert len(tries) == 4


async def test_an_unforeseen_failure_of_a_preflight_is_waited_out_like_any_other(
    clock: Clock, caplog: pytest.LogCaptureFixture
):
    tries = 0

    async def opening() -> str:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise ZeroDivisionError("?")
        return "open"

    preflight = Preflight(opening, clock)
    for _ in range(2):
        with pytest.raises(PreflightFailed):
            await preflight.get()
    assert caplog.text.count("Traceback") == 1
    clock.now += 1
    assert await preflight.get() == "open"
