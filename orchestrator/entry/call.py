"""One call of a trainer. Cheap to import: the trainer's event loop waits for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT_CONFIGS: Mapping[str, str] = {
    "swe": "1_0_0/min-swe-agent-train-top1",
    "cc": "train_cc_time3600",
    "oh": "eval_oh",
    "opencode": "eval_opencode",
    "codex": "eval_codex",
}
"""Kind of agent -> the configuration it has when none, or another kind's, is named."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One call, with everything that is not in the record."""

    agent_type: str
    config: str
    result_dir: str | None
    """Where per-episode logs go; None: `LOG_DIR`."""
    api_key: str = field(repr=False)
    base_url: str | None
    model: str | None = None
    opencode_provider: str | None = None
    codex_provider: str | None = None
    rollout_key: str | None = None
    """The caller's own identity for this rollout, for keys that many rollouts share."""
    timeout_s: float | None = None
    """When the caller gives up, counted from the call; its `econfig` may say it too."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """More settings, `section.key` -> value (None: not given)."""
