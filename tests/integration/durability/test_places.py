"""A worker dies beside a sandbox call, an extraction or a grading: the next one ends the rollout and leaves nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from store import failpoints
from tests.integration.durability import facts

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Database
    from tests.integration.durability.forking import ForkServer

CREATED, RUNNING, PATCHED = "created", "agent_running", "patched"
PASSED_IN = {
    "sandbox.before_create": (CREATED, PATCHED),
    "sandbox.after_create": (CREATED, PATCHED),
    "agent.after_extract": (RUNNING,),
    "sandbox.before_release": (PATCHED, PATCHED),
    "sandbox.after_release": (PATCHED, PATCHED),
    "grade.after_grading": (PATCHED,),
}
"""Place -> the state of the rollout at its first pass, and at its second. No walk passes it in another state."""

DEATHS = [
    pytest.param(place, passes, state, id=f"{place}-{passes}-{state}")
    for place, found in PASSED_IN.items()
    for passes, state in enumerate(found, 1)
]


def test_no_place_is_missing_here():
    assert set(PASSED_IN) == set(failpoints.PLACES)


def die_and_take_over(
    forks: ForkServer, database: Database, root: Path, place: str, passes: int, state: str
) -> None:
    arguments = {"url": database.url, "root": str(root)}
    first = forks.start("drive", **arguments, rollout_id=None, place=place, passes=passes)
    rollout_id = first.hear()
    assert first.rest() == []
    assert first.wait() == 137
    died = facts.dump(database.url)
    assert [row["state"] for row in died["rollouts"]] == [state]
    assert facts.violations(died, evidence=False) == []
    heir = forks.start("drive", **arguments, rollout_id=rollout_id, place=None, passes=0)
    assert heir.hear() == rollout_id
    assert heir.hear() == {"state": "released", "reward": 1.0, "left": []}
    heir.end()
    check_end(facts.dump(database.url), died)


def check_end(ended: facts.Dump, died: facts.Dump) -> None:
    """One reward, one verdict, every box closed with proof, the crash counted, and no patch taken twice."""
    (row,) = ended["rollouts"]
    assert (row["fence"], row["crash_count"]) == (2, 1)
    assert [attempt["outcome"] for attempt in ended["attempts"]] == ["crashed", "done"]
    assert facts.violations(ended, evidence=False) == []
    assert len(ended["rewards"]) == len(ended["grades"]) == len(ended["patches"]) == 1
    assert {box["status"] for box in ended["sandboxes"]} == {"released"}
    if died["patches"]:
        assert ended["patches"] == died["patches"]
        assert ended["llm_calls"] == died["llm_calls"]


@pytest.mark.long
@pytest.mark.parametrize(("place", "passes", "state"), DEATHS)
def test_a_worker_that_dies_beside_a_side_effect_is_followed_by_one_that_ends_the_rollout(
    forks: ForkServer, database: Database, tmp_path: Path, place: str, passes: int, state: str
):
    die_and_take_over(forks, database, tmp_path / "boxes", place, passes, state)
