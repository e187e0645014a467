"""The name of a run that nobody named: it follows from what is run, so that the same command means the same run."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator.states import TERMINAL

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from orchestrator.settings import Settings

_PART_LENGTH = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """The run to work on, and what to tell the person about the choice."""

    name: str
    notice: str = ""


def derived_name(tasks: Path, settings: Settings, config: str) -> str:
    """Return the name for a task file, agent, model and configuration: readable, with a digest of all of it."""
    place = tasks.resolve()
    parts = [place.stem if place.is_file() else place.name, settings.agent.type, settings.llm.model, config]
    digest = hashlib.sha256("\0".join([str(place), config, settings.sha256]).encode()).hexdigest()
    return "-".join([*(_slug(part) for part in parts if _slug(part)), digest[:8]])


def _slug(text: str) -> str:
    """Return what is readable of a text: of a path, its end."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-.")[-_PART_LENGTH:].strip("-.")


def newest_of(name: str, family: Sequence[str]) -> tuple[str, int] | None:
    """Return the last of NAME, NAME.2, NAME.3, ... with its number; None when there is none."""
    numbers = [_number(name, run) for run in family]
    number = max((n for n in numbers if n is not None), default=None)
    return None if number is None else (_numbered(name, number), number)


def choose(name: str, family: Sequence[str], states: Mapping[str, Mapping[str, int]]) -> Chosen:
    """Continue the newest run of this name while it has unfinished rollouts, else begin the next.

    `states` maps each existing run to state -> number of rollouts.
    """
    newest = newest_of(name, family)
    if newest is None:
        return Chosen(name=name)
    run, number = newest
    counts = states.get(run, {})
    unfinished = sum(n for state, n in counts.items() if state not in TERMINAL)
    if unfinished:
        total = sum(counts.values())
        return Chosen(
            name=run, notice=f"continuing run {run}: {unfinished} of {total} rollouts are unfinished"
        )
    following = _numbered(name, number + 1)
    return Chosen(
        name=following,
        notice=f"run {run} is finished; starting {following} (to see the old answers again: --run {run})",
    )


def _number(name: str, run: str) -> int | None:
    if run == name:
        return 1
    suffix = run.removeprefix(f"{name}.")
    is_number = suffix != run and re.fullmatch(r"[1-9]\d{0,8}", suffix) is not None
    return int(suffix) if is_number else None


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name}.{number}"
