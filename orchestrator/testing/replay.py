"""Recorded turns: what the scripted model says, read from a YAML file that people write by hand.

The file maps an instance id (or `*` for every other one) to a list of scenarios; sample k plays scenario k modulo
their number. A scenario has a name and turns; a turn has `content`, `tool_calls` (name, arguments), or both, and may
carry a `fault` that the server commits instead of, or before, answering.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from orchestrator import errors

if TYPE_CHECKING:
    from pathlib import Path

    from pydantic_core import ErrorDetails


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ScriptedCall(_Part):
    """One tool call of a turn."""

    name: str
    arguments: dict[str, Any] | str = Field(default_factory=dict)
    """A mapping is sent as JSON text; text is sent as it is, so that broken JSON can be played too."""


class Fault(_Part):
    """What the server does wrong at this turn."""

    status: int | None = Field(default=None, ge=200, le=599)
    body: str | None = None
    """The body instead of the answer, with `status` (200 when none is given)."""
    headers: dict[str, str] = Field(default_factory=dict)
    delay_s: float = Field(default=0.0, ge=0)
    drop: bool = False
    """Close the connection without a word once the request has been read."""
    times: int | None = Field(default=None, ge=1)
    """Only the first so many requests of this turn fail, as counted since the server started; default: all."""


class Turn(_Part):
    """One answer of the model."""

    content: str | None = None
    tool_calls: tuple[ScriptedCall, ...] = ()
    extra: dict[str, Any] = Field(default_factory=dict)
    """More fields of the assistant message, such as `reasoning_content`."""
    finish_reason: str | None = None
    """Default: `tool_calls` with tool calls, else `stop`."""
    usage: dict[str, Any] | None = None
    """Default: made up from the lengths of the texts."""
    fault: Fault | None = None


class Scenario(_Part):
    """One way a rollout may go."""

    name: str
    turns: tuple[Turn, ...]


class Script(_Part):
    """Every scenario of every instance."""

    scenarios: dict[str, tuple[Scenario, ...]]

    def scenario(self, instance_id: str, sample: int) -> Scenario | None:
        """Return what sample number `sample` (from 0) of an instance plays, or None for an unknown instance."""
        known = self.scenarios.get(instance_id) or self.scenarios.get("*")
        return known[sample % len(known)] if known else None


AFTERWARDS = Turn(content="I have nothing more to do.")
"""What is said once a scenario has no turn left."""

_FILE = TypeAdapter(dict[str, tuple[Scenario, ...]])


def load_replay(path: Path) -> Script:
    """Read a replay file; raises `errors.ConfigError` that says where it is wrong."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise errors.ConfigError(
            f"the replay file {path} cannot be read: {error}", hint="give the path of a YAML file of turns"
        ) from None
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        said = " ".join(str(error).split())
        raise errors.ConfigError(f"the replay file {path} is not valid YAML: {said}") from None
    return parse_replay(content, f"the replay file {path}")


def parse_replay(content: object, source: str = "the script") -> Script:
    """Check what a replay file holds; raises `errors.ConfigError`."""
    try:
        scenarios = _FILE.validate_python(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise errors.ConfigError(
            f"{source}: {_where(first['loc'])}{first['msg']}{_nearest(first)}",
            hint="a replay file maps an instance id to scenarios of `name` and `turns`; see examples/replay.yaml",
        ) from None
    empty = next((instance for instance, known in scenarios.items() if not known), None)
    if empty is not None:
        raise errors.ConfigError(
            f"{source}: {empty}: no scenario is given", hint="add one, or remove the instance"
        )
    return Script(scenarios=scenarios)


def _where(location: tuple[int | str, ...]) -> str:
    shown = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return f"{shown.lstrip('.')}: " if shown else ""


def _nearest(problem: ErrorDetails) -> str:
    if problem["type"] != "extra_forbidden":
        return ""
    known = [*Turn.model_fields, *Fault.model_fields, *Scenario.model_fields, *ScriptedCall.model_fields]
    near = difflib.get_close_matches(str(problem["loc"][-1]), known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
