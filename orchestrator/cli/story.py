"""The whole story of one rollout, from its rows, for people and for programs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orchestrator import errors
from orchestrator.cli import render
from orchestrator.provenance import documents
from orchestrator.rollout import part_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from store.history import History, Record

_TABLES = ("attempts", "transitions", "sandboxes", "steps", "llm_calls", "patches", "grades", "rewards")
_OMITTED = {"steps": ("output",)}
"""Columns that are whole documents: the transcript has its own option."""

_SECTIONS: dict[str, tuple[str, ...]] = {
    "transitions": ("seq", "src", "trig", "dst", "at", "fence", "actor", "payload"),
    "attempts": ("attempt_no", "worker_id", "claimed_at", "ended_at", "outcome", "error_class", "error"),
    "sandboxes": ("key", "role", "provider", "isolation", "status", "live_at", "released_at", "proof", "last_error"),
    "patches": ("sha256", "size", "files", "insertions", "deletions", "paths", "exit_reason", "exit_message", "notes"),
    "grades": (
        "grade_id", "outcome", "reward", "mask_sample", "evidence", "f2p_pass", "f2p_total", "p2p_pass", "p2p_total",
        "exit_code", "isolation", "duration_s", "flags", "error_text",
    ),
    "rewards": ("grade_id", "reward", "valid", "invalid_reason", "reward_fn_version", "at"),
}  # fmt: skip
_NARROW: dict[str, tuple[str, ...]] = {
    "transitions": ("seq", "at", "trig", "dst", "payload"),
    "attempts": ("attempt_no", "claimed_at", "ended_at", "outcome", "error"),
    "sandboxes": ("role", "status", "isolation", "live_at", "released_at", "key", "last_error"),
}
"""What a table on a terminal has room for; the other sections are shown as names and values there."""
_ROLLOUT = (
    "id", "run_id", "instance_id", "sample", "retry_no", "parent_id", "relation", "state", "agent_type", "attempts",
    "lease_owner", "lease_until", "failure_class", "failure_msg", "created_at", "finished_at", "task_sha256",
    "config_sha256",
)  # fmt: skip
_TIMES = {"at", "created_at", "updated_at", "finished_at", "claimed_at", "ended_at", "live_at", "released_at", "lease_until"}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Story:
    """Every row of one rollout."""

    rollout: Record
    tables: dict[str, list[Record]]


async def read(history: History, rollout_id: str) -> Story:
    """Read a rollout that exists."""
    row = await history.rollout(rollout_id)
    if row is None:
        raise errors.UsageError(f"there is no rollout {rollout_id}", hint="see `rollouts list`")
    tables = {}
    for name in _TABLES:
        rows = await history.of_rollout(name, rollout_id)
        tables[name] = [{k: v for k, v in r.items() if k not in _OMITTED.get(name, ())} for r in rows]
    return Story(rollout=row, tables=tables)


async def part(history: History, rollout_id: str, name: str) -> bytes:
    """Return the `patch`, the test `log`, or the `transcript` of a rollout.

    Raises `errors.UsageError` when it has none yet.
    """
    of = {"patch": documents.patch, "log": documents.test_log, "transcript": documents.transcript}[name]
    found = await of(history, rollout_id)
    if found is None:
        raise errors.UsageError(
            f"rollout {rollout_id} has no {name}", hint=f"see where it is: rollouts show {rollout_id}"
        )
    return found


def tell(story: Story, form: render.Form) -> None:
    """Write the story: one JSON object, or sections; in a pipe every line begins with its section."""
    if form is render.Form.JSON:
        render.emit([_document(story)], [render.Column(k) for k in _document(story)], form)
        return
    reward = story.tables["rewards"][0] if story.tables["rewards"] else None
    facts = [(key, story.rollout[key], key in _TIMES) for key in _ROLLOUT]
    _pairs("rollout", [fact for fact in facts if fact[1] is not None], form)
    for name, columns in _SECTIONS.items():
        _rows(name, story.tables[name], columns, form)
    _pairs("counts", _counts(story), form)
    if reward is not None:
        _pairs("stats", [(k, v, False) for k, v in json.loads(reward["stats"]).items()], form)


def _document(story: Story) -> dict[str, Any]:
    rewards = [{**r, "stats": json.loads(r["stats"])} for r in story.tables["rewards"]]
    return {
        **story.rollout,
        "settings": part_of(story.rollout, "settings"),
        **story.tables,
        "rewards": rewards,
    }


def _counts(story: Story) -> list[tuple[str, object, bool]]:
    calls = story.tables["llm_calls"]
    return [
        ("steps", len(story.tables["steps"]), False),
        ("llm_calls", len(calls), False),
        ("llm_calls_without_answer", sum(call["outcome"] != "ok" for call in calls), False),
        ("tool_calls", sum(step["tool_calls"] for step in story.tables["steps"]), False),
    ]


def _pairs(section: str, facts: Sequence[tuple[str, object, bool]], form: render.Form) -> None:
    rows = [
        {"section": section, "name": name, "value": render.Column(name, is_time=is_time).text(value)}
        for name, value, is_time in facts
    ]
    names = ("name", "value") if form is render.Form.TABLE else ("section", "name", "value")
    render.emit(rows, [render.Column(n) for n in names], form, title=section)


def _rows(section: str, found: Sequence[Record], names: Sequence[str], form: render.Form) -> None:
    if form is not render.Form.TABLE:
        columns = [render.Column(name, is_time=name in _TIMES) for name in names]
        render.emit(
            [{**row, "section": section} for row in found], [render.Column("section"), *columns], form
        )
    elif section in _NARROW:
        used = [n for n in _NARROW[section] if any(row[n] not in (None, [], {}) for row in found)]
        render.emit(found, [render.Column(n, is_time=n in _TIMES) for n in used], form, title=section)
    else:
        for row in found:
            _pairs(section, [(n, row[n], n in _TIMES) for n in names if row[n] not in (None, [], {})], form)
