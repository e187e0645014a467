"""The judge of the chaos run sees each kind of damage, so that its silence means something."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.acceptance.chaos import Seen
from tests.acceptance.chaos_facts import judge
from tests.integration.durability import facts

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ROLLOUT = "01a22ab5-0000-7000-8000-000000000001"
OWNER = ROLLOUT.replace("-", "")
TRIGGERS = (
    ("created", "provision"),
    ("sandbox_ready", "start_agent"),
    ("agent_running", "take_patch"),
    ("patched", "grade"),
    ("graded", "release"),
)


class Witnesses:
    """A sound run of one rollout: what each witness says. A test spoils one of them."""

    def __init__(self) -> None:
        moves = [
            {"rollout_id": ROLLOUT, "seq": seq, "src": src, "trig": trig, "fence": 1, "at": 1000 * seq}
            for seq, (src, trig) in enumerate(TRIGGERS, 1)
        ]
        grade = {
            "rollout_id": ROLLOUT,
            "patch_sha256": "p",
            "grader_digest": "g",
            "verdict": 1,
            "reason": "first",
        }
        self.found: facts.Dump = {table.name: [] for table in facts.TABLES} | {
            "rollouts": [
                {
                    "id": ROLLOUT, "sample": 0, "state": "released", "version": 5, "lease_owner": None,
                    "failure_class": None, "failure_msg": None, "crash_count": 0,
                }
            ],
            "transitions": moves,
            "attempts": [{"rollout_id": ROLLOUT, "fence": 1, "outcome": "done"}],
            "patches": [{"rollout_id": ROLLOUT}],
            "grades": [grade],
            "rewards": [{"rollout_id": ROLLOUT, "reward": 1.0}],
            "sandboxes": [{"key": self.key(1), "status": "released", "last_error": None}],
        }  # fmt: skip
        self.seen = Seen(
            acks=[[ROLLOUT, m["seq"], m["trig"], m["fence"]] for m in moves], requests=[(0, 2500)]
        )
        self.calls = [self.call(1, 0, "create", 1), self.call(2, 2000, "exec", 1)]
        self.left: list[str] = []

    @property
    def row(self) -> dict[str, Any]:
        return self.found["rollouts"][0]

    def key(self, fence: int) -> str:
        return f"rw-00000000-{OWNER}-{fence}-1"

    def call(self, number: int, at_ms: int, op: str, fence: int) -> dict[str, Any]:
        return {"n": number, "t_ms": at_ms, "op": op, "key": self.key(fence), "fence": fence, "ok": True}

    def violations(self, folder: Path) -> list[str]:
        oracle = folder / "oracle.jsonl"
        oracle.write_text("".join(f"{json.dumps(call)}\n" for call in self.calls))
        return judge(self.found, self.seen, oracle, self.left).violations


def lose_a_move(seen: Witnesses) -> None:
    seen.seen.acks.append([ROLLOUT, 6, "restart", 1])


def reward_twice(seen: Witnesses) -> None:
    seen.found["rewards"] *= 2


def reward_wrongly(seen: Witnesses) -> None:
    seen.found["rewards"] = [{"rollout_id": ROLLOUT, "reward": 0.0}]


def grade_twice(seen: Witnesses) -> None:
    seen.found["grades"] *= 2


def fail_for_no_reason(seen: Witnesses) -> None:
    seen.row.update(state="failed", failure_class="worker_lost", failure_msg="3 workers died")
    seen.found["rewards"] = []


def miscount_crashes(seen: Witnesses) -> None:
    seen.row["crash_count"] = 1


def leave_a_row_open(seen: Witnesses) -> None:
    seen.found["sandboxes"][0]["status"] = "releasing"


def leave_a_sandbox(seen: Witnesses) -> None:
    seen.left.append(seen.key(1))


def make_one_without_an_intent(seen: Witnesses) -> None:
    seen.calls.append(seen.call(3, 2100, "create", 1) | {"key": f"rw-00000000-{OWNER}-1-2"})


def act_as_a_zombie(seen: Witnesses) -> None:
    seen.calls += [seen.call(3, 3000, "create", 2), seen.call(4, 3251, "exec", 1)]


def ask_after_the_patch(seen: Witnesses) -> None:
    seen.seen.requests.append((0, 3251))


def break_a_worker(seen: Witnesses) -> None:
    seen.seen.broken.append("it raised")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lose_a_move, "P1"),
        (leave_a_row_open, "P2"),
        (leave_a_sandbox, "still has"),
        (make_one_without_an_intent, "P2"),
        (reward_twice, "P3"),
        (grade_twice, "P3"),
        (reward_wrongly, "P3"),
        (fail_for_no_reason, "P4"),
        (miscount_crashes, "crashes counted"),
        (act_as_a_zombie, "P6"),
        (ask_after_the_patch, "P6"),
        (break_a_worker, "broken worker"),
    ],
)
def test_every_kind_of_damage_is_seen(spoil: Callable[[Witnesses], None], said: str, tmp_path: Path):
    witnesses = Witnesses()
    spoil(witnesses)
    assert any(said in violation for violation in witnesses.violations(tmp_path))


def test_a_sound_run_and_a_call_that_was_under_way_are_no_violations(tmp_path: Path):
    witnesses = Witnesses()
    witnesses.found["sandboxes"].append({"key": witnesses.key(2), "status": "lost", "last_error": None})
    witnesses.calls += [witnesses.call(3, 3000, "create", 2), witnesses.call(4, 3250, "exec", 1)]
    assert witnesses.violations(tmp_path) == []
