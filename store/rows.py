"""The facts a caller may store, as plain frozen data. Numbering, times and fences are added inside the transaction."""

from __future__ import annotations

import hashlib
import json
import zlib
from dataclasses import dataclass, field
from typing import Any


def canonical_json(value: object) -> str:
    """Return the one JSON text of a value: sorted keys, no blanks. Raises `ValueError` for NaN and infinities."""
    return _ENCODER.encode(value)


def storable(value: Any) -> Any:  # noqa: ANN401 - JSON in, JSON out
    """Return the value with U+2400 in the place of every NUL character, which PostgreSQL refuses in texts and JSON."""
    if isinstance(value, str):
        return value.replace("\0", "\N{SYMBOL FOR NULL}")
    if isinstance(value, dict):
        return {storable(key): storable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [storable(inner) for inner in value]
    return value


_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
"""Made once: `json.dumps` would make one for every value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Artifact:
    """Bytes kept once under their digest, compressed when that helps."""

    sha256: str
    codec: str
    size: int
    """Of the bytes before compression."""
    stored: bytes

    @classmethod
    def of(cls, data: bytes) -> Artifact:
        """Digest and compress `data`."""
        packed = zlib.compress(data, 6)
        small = len(packed) < len(data)
        return cls(
            sha256=hashlib.sha256(data).hexdigest(),
            codec="zlib" if small else "raw",
            size=len(data),
            stored=packed if small else data,
        )


def unpack(codec: str, stored: bytes) -> bytes:
    """Return the bytes behind an artifact row."""
    return zlib.decompress(stored) if codec == "zlib" else stored


@dataclass(frozen=True, kw_only=True, slots=True)
class NewRollout:
    """A rollout to be submitted; `idem_key` decides whether it already exists."""

    id: str
    idem_key: str
    request_sha256: str
    run_id: str
    instance_id: str
    task_sha256: str
    task_json: str
    dataset_kind: str
    eval_sha256: str
    agent_type: str
    config_sha256: str
    endpoint_kind: str
    input: dict[str, Any]
    fsm_version: int
    outcome_table: int
    sample: int = 0
    retry_no: int = 0
    group_id: str | None = None
    session_ref: str | None = None
    parent_id: str | None = None
    relation: str | None = None
    policy_version: str | None = None
    deadline_ms: int | None = None
    """Of its caller, counted from the submission."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivery:
    """What a caller was handed: a number, the word that there is none, or an exception."""

    delivery_id: str
    rollout_id: str
    value: float | None = None
    exception: str | None = None
    session_ref: str | None = None
    """sha256 of the caller's key."""
    policy_version: str | None = None

    @property
    def kind(self) -> str:
        """One of value, none and exception."""
        if self.exception is not None:
            return "exception"
        return "none" if self.value is None else "value"


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """The right to change one rollout: good while `fence` is the row's and the lease has not run out."""

    rollout_id: str
    fence: int
    attempt_no: int
    version: int
    state: str
    previous: str | None
    """How the attempt before this one ended: None for the first claim, `crashed` when nobody said."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GiveBack:
    """Ends the attempt and frees the lease in the same transaction as whatever it rides on."""

    outcome: str
    """done | failed | interrupted"""
    error_class: str | None = None
    error: str | None = None
    delay_ms: int = 0
    """Nobody claims the rollout before this much time has passed."""
    spend: str | None = None
    """crash | infra | grade: the budget that the next attempt is paid from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRow:
    """One completed turn of an agent."""

    name: str
    output: dict[str, Any]
    tool_calls: int = 0
    format_errors: int = 0
    command_timeouts: int = 0
    truncated_observations: int = 0
    tool_ms: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class LlmCallRow:
    """One request to the model."""

    kind: str
    outcome: str
    request_sha256: str
    via: str = "direct"
    step: str | None = None
    lane: str | None = None
    response_id: str | None = None
    model: str | None = None
    http_status: int | None = None
    finish_reason: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    duration_ms: int = 0
    error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PatchRow:
    """The patch as taken when the agent ended."""

    artifact: Artifact
    base_commit: str
    exit_reason: str
    exit_message: str
    insertions: int = 0
    deletions: int = 0
    paths: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class GradeRow:
    """One grading attempt of one patch."""

    grade_id: str
    patch_sha256: str
    grader_digest: str
    grader: str
    grader_version: str
    reason: str
    outcome: str
    verdict: bool
    reward: float | None
    mask_sample: bool
    evidence: str
    f2p_pass: int
    f2p_total: int
    p2p_pass: int
    p2p_total: int
    test_map: Artifact
    log: Artifact
    exit_code: int | None
    task_sha256: str
    eval_sha256: str
    isolation: str | None
    sandbox_key: str | None
    flags: list[str]
    duration_s: float
    error_class: str | None = None
    error_text: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardRow:
    """What the rollout was worth and the numbers handed back with it; written once, for ever."""

    grade_id: str
    reward: float | None
    invalid_reason: str | None
    reward_fn_version: str
    outcome_table: int
    stats: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxIntent:
    """Written and committed before the create call goes out."""

    key: str
    role: str
    provider: str
    provider_ref: str
    env_name: str | None
    ttl_s: int
    create_timeout_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxLive:
    """The provider's answer to a create call."""

    key: str
    provider_ids: list[str]
    isolation: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """The agent is about to ask its model for the first time in this attempt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxReleasing:
    """The sandbox is given up; None as `key` means every open one of the rollout, save the one called `but`."""

    key: str | None = None
    but: str | None = None


Row = (
    Asked
    | StepRow
    | LlmCallRow
    | PatchRow
    | GradeRow
    | RewardRow
    | SandboxIntent
    | SandboxLive
    | SandboxReleasing
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationRow:
    """One control run of a task: the no-op or the gold patch through a grader."""

    task_sha256: str
    task_json: str
    instance_id: str
    dataset_kind: str
    eval_sha256: str
    grader_digest: str
    patch: str
    outcome: str
    as_expected: bool
    reasons: list[str]
    test_map: Artifact
    log: Artifact
    duration_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Applied:
    """The write is durable."""

    version: int
    state: str


@dataclass(frozen=True, kw_only=True, slots=True)
class AlreadyApplied:
    """An earlier try of this very write is durable; its acknowledgement was lost."""

    version: int
    state: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseLost:
    """Somebody else owns the rollout now: stop at once and touch nothing of it."""

    fence: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Terminal:
    """The rollout is over; answer from the store."""

    state: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseExpired:
    """The lease ran out but nobody claimed: reacquire, then write again under the new fence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionConflict:
    """Another write of the same owner came in between: re-read."""

    version: int
    state: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Cancelled:
    """A person asked for this rollout to stop, and this edge may be refused for it."""


Outcome = Applied | AlreadyApplied | LeaseLost | Terminal | LeaseExpired | VersionConflict | Cancelled
