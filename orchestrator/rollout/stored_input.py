"""What a rollout was submitted with, read back from its row; another version or a hand may have written it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from orchestrator import errors
from orchestrator.settings import stored
from orchestrator.tasks.record import RepoSource

if TYPE_CHECKING:
    from orchestrator.settings import Settings
    from store.history import Record


class _Shape(BaseModel):
    model_config = ConfigDict(strict=False, frozen=True)

    settings: Mapping[str, Any]
    repo_source: RepoSource | None = None
    origin: Mapping[str, str] = {}


class StoredInput:
    """A rollout's settings, where its repository came from, and where it was asked for (see `submission.Request`)."""

    def __init__(self, row: Record) -> None:
        """Read a row of `rollouts`; raises `errors.InternalError` when this version cannot."""
        try:
            shape = _Shape.model_validate(row["input"])
            self.settings: Settings = stored(shape.settings)
        except (ValidationError, errors.ConfigError) as e:
            what = "; ".join(_problems(e)) if isinstance(e, ValidationError) else str(e)
            raise errors.InternalError(
                f"its stored input cannot be read by this version: {what}",
                hint="`rollouts show ID --json` prints it; resume with the version that wrote it",
            ) from None
        self.repo_source = shape.repo_source
        self.origin = shape.origin


def _problems(error: ValidationError) -> list[str]:
    return [
        f"{'.'.join(map(str, problem['loc'])) or 'input'}: {problem['msg']}" for problem in error.errors()
    ]


def part_of(row: Record, name: str) -> Mapping[str, Any]:
    """Return a part of a rollout's input, `origin` or `settings`, as it is stored; nothing where there is no such thing."""
    given = row["input"]
    part = given.get(name) if isinstance(given, dict) else None
    return part if isinstance(part, dict) else {}
