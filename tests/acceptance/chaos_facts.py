"""What must hold after chaos, from three witnesses: the database, the service's oracle, and what the test saw itself."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from orchestrator import errors
from tests.integration.durability import facts

if TYPE_CHECKING:
    from pathlib import Path

    from tests.acceptance.chaos import Seen
    from tests.integration.durability.facts import Dump

MARGIN_MS = 250
"""A call that was under way when its caller lost the rollout may arrive so late."""
REWARDS = (1.0, 0.0, 0.0)
"""What the scenarios solves, wrong and idle are worth; sample k plays scenario k modulo three."""
_ACTS = ("exec", "write")


@dataclass
class Verdict:
    """Every violation, and the figures that tell how much was tried."""

    violations: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        shown = ", ".join(f"{name} {value}" for name, value in self.figures.items())
        return f"{shown}, {len(self.violations)} violations"


def judge(found: Dump, seen: Seen, oracle: Path, left: list[str]) -> Verdict:
    """Return what is wrong, and how much was looked at."""
    calls = [json.loads(line) for line in oracle.read_text(encoding="utf-8").splitlines()]
    verdict = Verdict()
    verdict.violations += [f"broken worker: {text}" for text in seen.broken]
    verdict.violations += _lost_acks(found, seen)
    verdict.violations += facts.violations(found)
    verdict.violations += _endings(found, verdict)
    verdict.violations += _ledger(found, calls, verdict)
    verdict.violations += [f"the service still has {key}" for key in left]
    verdict.violations += _zombies(calls, verdict)
    verdict.violations += _late_requests(found, seen, verdict)
    verdict.figures["acknowledged"] = len(seen.acks)
    return verdict


def _lost_acks(found: Dump, seen: Seen) -> list[str]:
    moves = {(m["rollout_id"], m["seq"], m["trig"], m["fence"]) for m in found["transitions"]}
    return [f"P1: lost {ack}" for ack in seen.acks if tuple(ack) not in moves]


def _endings(found: Dump, verdict: Verdict) -> list[str]:
    """One verdict and one reward, the scripted one, for a released rollout; a failed one has none, and a reason."""
    wrong = []
    rewards, verdicts = defaultdict(list), Counter[tuple[str, str, str]]()
    for row in found["rewards"]:
        rewards[row["rollout_id"]].append(row["reward"])
    for row in found["grades"]:
        if row["verdict"] and row["reason"] == "first":
            verdicts[row["rollout_id"], row["patch_sha256"], row["grader_digest"]] += 1
    wrong += [f"P3: graded {times} times: {what}" for what, times in verdicts.items() if times > 1]
    crashed = Counter(a["rollout_id"] for a in found["attempts"] if a["outcome"] == "crashed")
    states = Counter(row["state"] for row in found["rollouts"])
    for row in found["rollouts"]:
        name, given = f"{row['id']} (sample {row['sample']})", rewards[row["id"]]
        expected = [REWARDS[row["sample"] % len(REWARDS)]] if row["state"] == "released" else []
        if given != expected:
            wrong.append(f"P3/P4: {name} is {row['state']} with rewards {given}, not {expected}")
        if row["state"] not in ("released", "failed"):
            wrong.append(f"{name} is not over: {row['state']}")
        if row["state"] == "failed" and (
            row["failure_class"] != "worker_lost" or crashed[row["id"]] <= errors.BUDGETS[errors.Budget.CRASH]
        ):
            wrong.append(f"P4: {name} failed: {row['failure_class']}: {row['failure_msg']}")
        if crashed[row["id"]] != row["crash_count"]:
            wrong.append(f"{name}: {row['crash_count']} crashes counted, {crashed[row['id']]} in attempts")
    verdict.figures |= {
        "rollouts": len(found["rollouts"]),
        "released": states["released"],
        "failed (crash budget spent)": states["failed"],
        "attempts": len(found["attempts"]),
        "crashed": sum(crashed.values()),
    }
    return wrong


def _ledger(found: Dump, calls: list[dict[str, Any]], verdict: Verdict) -> list[str]:
    """Every sandbox that was asked for has a row, and every row is closed."""
    status = Counter(row["status"] for row in found["sandboxes"])
    verdict.figures |= {
        "sandboxes": sum(status.values()),
        "sandboxes released": status["released"],
        "sandboxes lost": status["lost"],
    }
    declared = {row["key"] for row in found["sandboxes"]}
    asked = {call["key"] for call in calls if call["op"] == "create"}
    return [f"P2: sandbox {key} was made without an intent" for key in sorted(asked - declared)] + [
        f"P2: sandbox {row['key']} is {row['status']}: {row['last_error']}"
        for row in found["sandboxes"]
        if row["status"] not in ("released", "lost")
    ]


def _zombies(calls: list[dict[str, Any]], verdict: Verdict) -> list[str]:
    """Find what an owner did in a sandbox after a newer one had begun; calls about a sandbox that is gone do nothing."""
    wrong = []
    began: dict[str, dict[int, int]] = defaultdict(dict)
    refused = 0
    for call in sorted(calls, key=lambda call: int(call["n"])):
        if call["op"] not in ("create", "attach", *_ACTS):
            continue
        owner, fence = call["key"].split("-")[2], call["fence"]
        newer = [at_ms for other, at_ms in began[owner].items() if other > fence]
        if newer and call["op"] in _ACTS:
            late_ms = call["t_ms"] - min(newer)
            refused += not call["ok"]
            if call["ok"] and late_ms > MARGIN_MS:
                wrong.append(f"P6: {call['op']} in {call['key']} by fence {fence}, {late_ms} ms too late")
        if call["op"] != "attach":
            began[owner].setdefault(fence, call["t_ms"])
    verdict.figures |= {"calls of the service": len(calls), "late calls refused": refused}
    return wrong


def _late_requests(found: Dump, seen: Seen, verdict: Verdict) -> list[str]:
    """Find requests of a model after the rollout's patch was taken."""
    samples = {row["id"]: row["sample"] for row in found["rollouts"]}
    patched = {samples[m["rollout_id"]]: m["at"] for m in found["transitions"] if m["trig"] == "take_patch"}
    verdict.figures["requests of a model"] = len(seen.requests)
    return [
        f"P6: a model was asked for sample {sample} {at_ms - patched[sample]} ms after its patch was taken"
        for sample, at_ms in seen.requests
        if sample in patched and at_ms > patched[sample] + MARGIN_MS
    ]
