"""A caller may be cancelled at any moment: every rollout comes to its end, and what was handed over is what was heard."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator import assembly, entry, errors
from orchestrator.sandbox import registry
from orchestrator.settings import database_url
from orchestrator.testing.faults import FaultyProvider
from orchestrator.testing.replay import load_replay, parse_replay
from store import failpoints
from tests.integration.areal.conftest import EXAMPLES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from orchestrator.testing.areal_proxy import FakeProxy
    from tests.integration.areal.conftest import Caller

SOLVED = load_replay(EXAMPLES / "replay.yaml").scenarios["offline__wordcount-1"][:1]
IDLE = {"*": [{"name": "idle", "turns": [{"tool_calls": [{"name": "submit"}]}]}]}


@pytest.fixture
def at(proxy: FakeProxy) -> Iterator[Callable[[str], tuple[threading.Event, threading.Event]]]:
    """Holds the writer at a failpoint: (it has come there, let it go on)."""
    held: list[threading.Event] = []

    def hold(point: str) -> tuple[threading.Event, threading.Event]:
        there, go = threading.Event(), threading.Event()
        held.append(go)

        def act(passed: str) -> None:
            if passed == point and not there.is_set():
                there.set()
                go.wait(30)

        failpoints.install(act)
        return there, go

    proxy.script = parse_replay(IDLE)
    yield hold
    failpoints.install(None)
    for go in held:
        go.set()


@pytest.mark.parametrize(
    ("point", "state", "deliveries"),
    [
        pytest.param(
            "submit.before_commit", ("failed", "cancelled"), [("exception",)], marks=pytest.mark.long
        ),
        ("submit.after_commit", ("failed", "cancelled"), [("exception",)]),
        pytest.param(
            "claim.before_commit", ("failed", "cancelled"), [("exception",)], marks=pytest.mark.long
        ),
        ("claim.after_commit", ("failed", "cancelled"), [("exception",)]),
        pytest.param(
            "transition.provision.before_commit",
            ("failed", "cancelled"),
            [("exception",)],
            marks=pytest.mark.long,
        ),
        ("transition.take_patch.after_commit", ("failed", "cancelled"), [("exception",)]),
        pytest.param(
            "transition.grade.before_commit", ("released", None), [("exception",)], marks=pytest.mark.long
        ),
        ("transition.grade.after_commit", ("released", None), [("exception",)]),
        ("deliver.after_commit", ("released", None), [("exception",)]),
    ],
)
async def test_a_cancelled_call_leaves_a_rollout_that_is_over_and_nothing_handed_over(
    call: Caller,
    proxy: FakeProxy,
    record: dict[str, Any],
    query: Any,
    at: Any,
    point: str,
    state: tuple[str, str | None],
    deliveries: list[tuple[str]],
):
    call.base_url = proxy.base_url
    there, go = at(point)
    running = asyncio.create_task(call(record, proxy.session("any")))
    await asyncio.to_thread(there.wait, 30)
    running.cancel()
    await asyncio.sleep(0)
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    await entry.close()
    assert query("select state, failure_class from rollouts") == [state]
    assert query("select kind from deliveries_v") == deliveries
    assert query("select sum(delivered) from group_outcomes") == [(0,)]
    assert query("select count(*) from sandboxes where status <> 'released'") == [(0,)]


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> list[FaultyProvider]:
    """Every provider that is made from now on, with faults to be set."""
    made: list[FaultyProvider] = []
    make = registry.make

    def wrapped(*arguments: Any, **options: Any) -> FaultyProvider:
        made.append(FaultyProvider(make(*arguments, **options)))
        return made[-1]

    monkeypatch.setattr(registry, "make", wrapped)
    return made


@pytest.mark.long
async def test_a_call_cancelled_between_two_attempts_ends_its_rollout(
    call: Caller,
    proxy: FakeProxy,
    record: dict[str, Any],
    query: Any,
    faulty: list[FaultyProvider],
    tmp_path: Any,
):
    call.base_url = proxy.base_url
    call.config = str(tmp_path / "patient.yaml")
    (tmp_path / "patient.yaml").write_text("extends: train\nretry: {backoff_base_s: 300}\n")
    proxy.script = parse_replay(IDLE)
    waiting = await call(record, proxy.session("any"))
    assert waiting[0] == 0.0
    faulty[0].fault = lambda name, _number: (
        errors.SandboxCreateFailed("no") if name.startswith("create") else None
    )
    running = asyncio.create_task(call(record, proxy.session("any")))
    async with asyncio.timeout(30):
        while query("select count(*) from rollouts where state = 'created' and not_before > created_at") != [
            (1,)
        ]:
            await asyncio.wait({running}, timeout=0.05)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await entry.close()
    assert query("select failure_class, count(*) from rollouts where state = 'failed' group by 1") == [
        ("cancelled", 1)
    ]


@pytest.mark.long
async def test_a_sandbox_that_cannot_be_released_holds_up_neither_the_verdict_nor_the_answer(
    call: Caller, proxy: FakeProxy, record: dict[str, Any], query: Any, faulty: list[FaultyProvider]
):
    call.base_url = proxy.base_url
    proxy.script = parse_replay(IDLE)
    assert (await call(record, proxy.session("any")))[0] == 0.0
    proxy.script = parse_replay({"*": [s.model_dump(exclude_none=True) for s in SOLVED]})
    faulty[0].fault = lambda name, _number: (
        RuntimeError("a bug of the provider") if name == "release" else None
    )
    reward, stats = await call(record, proxy.session("any"))
    assert (reward, stats["resolved"]) == (1.0, 1)
    assert query("select state from rollouts order by created_at desc limit 1") == [("graded",)]
    faulty[0].fault = lambda _name, _number: None
    await entry.close()
    swept = await assembly.clean(database_url(None))
    assert (swept.clean, {s.outcome for s in swept.swept}) == (True, {"removed"})


@pytest.mark.long
async def test_what_fails_before_the_first_question_is_tried_again_inside_the_callers_session(
    call: Caller, proxy: FakeProxy, record: dict[str, Any], query: Any, faulty: list[FaultyProvider]
):
    call.base_url = proxy.base_url
    proxy.script = parse_replay(IDLE)
    assert (await call(record, proxy.session("any")))[0] == 0.0
    faulty[0].fault = lambda name, n: (
        errors.SandboxCreateFailed("once") if (name, n) == ("create:task", 2) else None
    )
    assert (await call(record, proxy.session("any")))[0] == 0.0
    assert query("select max(infra_count), count(*) from rollouts where state = 'released'") == [(1, 2)]


async def test_a_call_that_meets_a_dying_rollout_hears_what_came_of_it_and_is_not_cancelled_itself(
    call: Caller, proxy: FakeProxy, record: dict[str, Any], query: Any, at: Any
):
    proxy.script = parse_replay({"*": [{"name": "slow", "turns": [{"fault": {"delay_s": 600.0}}]}]})
    call.base_url, key = proxy.base_url, proxy.session("any")
    first = asyncio.create_task(call(record, key))
    await proxy.wait_for(lambda p: p.sessions[key].requests == 1)
    there, go = at("transition.fail.before_commit")
    proxy.script = parse_replay({"*": [{"name": "slow", "turns": [{"fault": {"delay_s": 600.0}}]}]})
    first.cancel()
    await asyncio.to_thread(there.wait, 30)
    second = asyncio.create_task(call(record, key))
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert await second == (None, {"failure_class": "cancelled"})
