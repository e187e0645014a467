"""From rows to (reward, stats), and nowhere else: every number handed to a trainer is computed here, from stored facts.

Each key is declared once, with its unit and the rows it comes from, so that it can be explained and recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orchestrator import errors

if TYPE_CHECKING:
    from collections.abc import Callable

    from store.history import History, Record

REWARD_FN = "resolved@1"
"""1.0 for a resolved instance, else 0.0; no number where the outcome table allows none or the sample is masked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Every stored row that stats are computed from: those of all attempts of one rollout."""

    rollout: Record
    grade: Record
    """The effective grade: the one the reward names."""
    grades: list[Record]
    patch: Record
    steps: list[Record]
    llm_calls: list[Record]
    sandboxes: list[Record]


async def gather(history: History, rollout_id: str, grade_id: str) -> Facts:
    """Read the rows that the reward and stats of a graded rollout rest on."""
    rollout = await history.rollout(rollout_id)
    if rollout is None:
        raise errors.InternalError(f"rollout {rollout_id} has no row")
    grades = await history.of_rollout("grades", rollout_id)
    patches = await history.of_rollout("patches", rollout_id)
    return Facts(
        rollout=rollout,
        grade=next(g for g in grades if g["grade_id"] == grade_id),
        grades=grades,
        patch=patches[-1],
        steps=await history.of_rollout("steps", rollout_id),
        llm_calls=await history.of_rollout("llm_calls", rollout_id),
        sandboxes=await history.of_rollout("sandboxes", rollout_id),
    )


@dataclass(frozen=True, slots=True)
class Stat:
    """One key of `stats`."""

    name: str
    unit: str
    meaning: str
    source: str
    """Table and columns."""
    compute: Callable[[Facts], Any]


def _total(rows: list[Record], column: str) -> int:
    return sum(row[column] for row in rows)


def _created_s(facts: Facts) -> float:
    made = [s for s in facts.sandboxes if s["live_at"] is not None]
    return float(sum(s["live_at"] - s["intent_at"] for s in made) / 1000)


STATS: tuple[Stat, ...] = (
    Stat("n_steps", "steps", "completed agent turns", "steps", lambda f: len(f.steps)),
    Stat("n_llm_calls", "calls", "requests to the model", "llm_calls", lambda f: len(f.llm_calls)),
    Stat("n_tool_calls", "calls", "tool calls executed", "steps.tool_calls", lambda f: _total(f.steps, "tool_calls")),
    Stat(
        "n_format_errors", "turns", "unusable model turns", "steps.format_errors",
        lambda f: _total(f.steps, "format_errors"),
    ),
    Stat(
        "n_cmd_timeouts", "commands", "commands over their time", "steps.command_timeouts",
        lambda f: _total(f.steps, "command_timeouts"),
    ),
    Stat(
        "n_truncated_obs", "observations", "tool outputs shortened for the model", "steps.truncated_observations",
        lambda f: _total(f.steps, "truncated_observations"),
    ),
    Stat(
        "prompt_tokens", "tokens", "prompt tokens of all calls", "llm_calls.prompt_tokens",
        lambda f: _total(f.llm_calls, "prompt_tokens"),
    ),
    Stat(
        "completion_tokens", "tokens", "sampled tokens of all calls", "llm_calls.completion_tokens",
        lambda f: _total(f.llm_calls, "completion_tokens"),
    ),
    Stat(
        "llm_time_s", "s", "waiting for the model", "llm_calls.duration_ms",
        lambda f: _total(f.llm_calls, "duration_ms") / 1000,
    ),
    Stat("tool_time_s", "s", "running tools", "steps.tool_ms", lambda f: _total(f.steps, "tool_ms") / 1000),
    Stat("env_create_s", "s", "making sandboxes", "sandboxes.intent_at, live_at", _created_s),
    Stat("grade_s", "s", "grading, all attempts", "grades.duration_s", lambda f: sum(g["duration_s"] for g in f.grades)),
    Stat(
        "total_s", "s", "from submission to the effective grade", "rollouts.created_at, grades.ended_at",
        lambda f: (f.grade["ended_at"] - f.rollout["created_at"]) / 1000,
    ),
    Stat("patch_bytes", "bytes", "size of the patch", "patches.size", lambda f: f.patch["size"]),
    Stat("patch_files", "files", "files the patch touches", "patches.files", lambda f: f.patch["files"]),
    Stat("patch_empty", "0 or 1", "the agent changed nothing", "patches.size", lambda f: int(f.patch["size"] == 0)),
    Stat(
        "resolved", "0 or 1", "the grader's verdict is resolved", "grades.outcome",
        lambda f: int(f.grade["outcome"] == errors.GradeOutcome.RESOLVED),
    ),
    Stat("f2p_pass", "tests", "FAIL_TO_PASS tests that pass", "grades.f2p_pass", lambda f: f.grade["f2p_pass"]),
    Stat("f2p_total", "tests", "FAIL_TO_PASS tests", "grades.f2p_total", lambda f: f.grade["f2p_total"]),
    Stat("p2p_pass", "tests", "PASS_TO_PASS tests that pass", "grades.p2p_pass", lambda f: f.grade["p2p_pass"]),
    Stat("p2p_total", "tests", "PASS_TO_PASS tests", "grades.p2p_total", lambda f: f.grade["p2p_total"]),
    Stat("exit_reason", "name", "how the agent ended", "patches.exit_reason", lambda f: f.patch["exit_reason"]),
    Stat("grade_outcome", "name", "what the grader found", "grades.outcome", lambda f: f.grade["outcome"]),
    Stat("mask_sample", "0 or 1", "the sample must not train", "grades.mask_sample", lambda f: f.grade["mask_sample"]),
)  # fmt: skip
"""The declared list: documentation, explanation and recomputation all read it."""


def stats_of(facts: Facts) -> dict[str, Any]:
    """Compute the flat `stats` dict, in declared order."""
    return {stat.name: stat.compute(facts) for stat in STATS}


def stats_of_failure(failure_class: str | None) -> dict[str, Any]:
    """Return what can be said of a rollout without a grade: why there is none (`rollouts.failure_class`)."""
    return {} if failure_class is None else {"failure_class": failure_class}


def reward_of(outcome: errors.GradeOutcome, *, masked: bool) -> float | None:
    """Return what a grade is worth; None means that no number may exist."""
    rule = errors.GRADE_RULES[outcome]
    return None if masked or not rule.verdict else rule.reward
