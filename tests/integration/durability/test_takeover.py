"""A worker dies in the middle of the agent's work: the next one goes on after the last completed step, where that is safe."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.integration.durability import facts

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Database
    from tests.integration.durability.forking import ForkServer

DEATHS = {
    "at the first answer": ("record.after_commit", 2, True),
    "after the first step": ("record.after_commit", 3, False),
    "at the second answer": ("record.after_commit", 4, True),
    "after the second step": ("record.after_commit", 5, False),
    "before the agent began": ("transition.provision.after_commit", 1, False),
    "when the agent began": ("transition.start_agent.after_commit", 1, False),
    "with the patch in hand": ("transition.take_patch.before_commit", 1, False),
}
"""What is done when the worker dies -> (failpoint, pass, whether the next worker has to begin anew)."""


def died(forks: ForkServer, arguments: dict[str, str], place: str, passes: int) -> str:
    """Drive a new rollout until the process dies there; return its id."""
    first = forks.start("drive", **arguments, rollout_id=None, place=place, passes=passes)
    rollout_id = str(first.hear())
    assert first.rest() == []
    assert first.wait() == 137
    return rollout_id


def taken_over(forks: ForkServer, arguments: dict[str, str], rollout_id: str) -> facts.Dump:
    """Drive it to its end in a new process; return what is stored then."""
    heir = forks.start("drive", **arguments, rollout_id=rollout_id, place=None, passes=0)
    assert heir.hear() == rollout_id
    assert heir.hear() == {"state": "released", "reward": 1.0, "left": []}
    heir.end()
    return facts.dump(arguments["url"])


@pytest.mark.long
def test_an_owner_that_is_out_of_sight_may_live_and_keeps_its_sandbox_to_itself(
    forks: ForkServer, database: Database, tmp_path: Path
):
    arguments = {"url": database.url, "root": str(tmp_path / "boxes")}
    rollout_id = died(forks, arguments, "record.after_commit", 3)
    database.ask("UPDATE workers SET pid_ns = 'another'")
    ended = taken_over(forks, arguments, rollout_id)
    assert "restart" in [move["trig"] for move in ended["transitions"]]
    assert [box["role"] for box in ended["sandboxes"]].count("task") == 2


@pytest.mark.long
def test_a_sandbox_is_used_only_when_everybody_who_ever_had_it_is_provably_dead(
    forks: ForkServer, database: Database, tmp_path: Path
):
    """The last owner may have died before it did anything, while the one before it still types into the sandbox."""
    arguments = {"url": database.url, "root": str(tmp_path / "boxes")}
    rollout_id = died(forks, arguments, "record.after_commit", 3)
    database.ask("UPDATE workers SET pid_ns = 'another'")
    second = forks.start("drive", **arguments, rollout_id=rollout_id, place="claim.after_commit", passes=1)
    second.rest()
    assert second.wait() == 137
    database.ask("UPDATE rollouts SET lease_until = 1")
    ended = taken_over(forks, arguments, rollout_id)
    assert "restart" in [move["trig"] for move in ended["transitions"]]


@pytest.mark.parametrize(
    "death",
    [pytest.param(name, marks=() if name == "at the second answer" else pytest.mark.long) for name in DEATHS],
)
def test_the_work_of_a_dead_worker_goes_on_after_its_last_step_unless_the_sandbox_may_be_ahead(
    forks: ForkServer, database: Database, tmp_path: Path, death: str
):
    place, passes, anew = DEATHS[death]
    arguments = {"url": database.url, "root": str(tmp_path / "boxes")}
    rollout_id = died(forks, arguments, place, passes)
    ended = taken_over(forks, arguments, rollout_id)
    assert facts.violations(ended, evidence=False) == []
    assert ("restart" in [move["trig"] for move in ended["transitions"]]) is anew
    of_role = [box["role"] for box in ended["sandboxes"]]
    assert of_role.count("task") == (2 if anew else 1)
    last = max(move["fence"] for move in ended["transitions"] if move["trig"] == "start_agent")
    steps = sorted((step["name"], step["attempt_no"]) for step in ended["steps"] if step["fence"] >= last)
    assert [name for name, _ in steps] == ["turn-0001", "turn-0002", "turn-0003"]
    sent = [json.loads(step["output"])["messages"] for step in ended["steps"] if step["fence"] >= last]
    assert [[m["role"] for m in messages] for messages in sent] == [
        ["system", "user", "assistant", "tool"], ["assistant", "tool"], ["assistant", "tool"],
    ]  # fmt: skip
