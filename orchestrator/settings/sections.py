"""Every setting with its default, unit and meaning; frozen once built."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

AgentType = Literal["swe", "cc", "oh", "opencode", "codex"]
ToolName = Literal["bash", "search_replace", "view", "create", "submit"]


class Section(BaseModel):
    """One group of settings; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class AgentSettings(Section):
    """How the agent works. Token numbers are tokens, times seconds."""

    type: AgentType = "swe"
    provider: str | None = None
    """Name of the model provider in the configuration of opencode or codex."""
    step_limit: int = Field(default=100, ge=1)
    """Model turns."""
    max_completion_tokens: int = Field(default=16384, ge=1)
    """Asked of the endpoint for each turn."""
    token_limit: int | None = Field(default=None, ge=1)
    """Prompt and completion tokens of the last turn together; beyond it the run ends."""
    timeout_s: float = Field(default=1800.0, gt=0)
    """Wall time of the whole agent run."""
    command_timeout_s: float = Field(default=60.0, gt=0)
    max_command_timeout_s: float = Field(default=600.0, gt=0)
    """The most that a tool call may ask for."""
    max_command_timeouts: int = Field(default=3, ge=1)
    """So many commands over time in a row end the run."""
    max_format_errors: int = Field(default=3, ge=1)
    """So many unusable turns in a row end the run."""
    observation_limit: int = Field(default=10_000, ge=100)
    """Characters of tool output shown to the model: half from the head, half from the tail."""
    tools: tuple[ToolName, ...] = ("bash", "search_replace")
    temperature: float | None = None
    top_p: float | None = None
    system_prompt: str = "You are a software engineer. Solve the task with the tools you are given."
    instance_prompt: str = "Work in {workdir}.\n\n{problem_statement}"
    """Placeholders: {workdir}, {problem_statement}, {instance_id}."""


class LlmSettings(Section):
    """How the endpoint is called. No request is repeated once it may have been sampled."""

    base_url: str | None = None
    model: str = ""
    api_key_env: str = "OPENAI_API_KEY"
    """Name of the variable that holds the key; the name is stored, the key never is."""
    request_timeout_s: float = Field(default=600.0, gt=0)
    connect_retries: int = Field(default=5, ge=0)
    """Repeats of a request that was refused before it can have been sampled."""
    retry_base_s: float = Field(default=1.0, ge=0)
    retry_cap_s: float = Field(default=30.0, ge=0)


class SandboxSettings(Section):
    """Where and how sandboxes are made."""

    provider: Literal["local"] = "local"
    root: Path | None = None
    """Folder of local workspaces; default: the platform's temporary directory."""
    python: Path | None = None
    """Interpreter (of a virtual environment with pytest) for local sandboxes; default: one kept in the cache."""
    read_only_paths: tuple[Path, ...] = ()
    """More paths of this machine that local sandboxes may read."""
    allow_no_isolation: bool = False
    isolation: Literal["auto", "bwrap", "unshare", "none"] = "auto"
    create_timeout_s: float = Field(default=600.0, gt=0)
    memory_mb: int | None = Field(default=4096, ge=64)
    processes: int | None = Field(default=512, ge=16)
    file_mb: int | None = Field(default=1024, ge=1)


class GradingSettings(Section):
    """How patches are taken and graded."""

    timeout_s: float | None = Field(default=None, gt=0)
    """Of the test command; default: the record's `timeout_s`."""
    patch_limit_bytes: int = Field(default=5_000_000, ge=1)
    extract_timeout_s: float = Field(default=300.0, gt=0)
    log_limit_bytes: int = Field(default=10_000_000, ge=1000)


class RetrySettings(Section):
    """Pause before a new attempt: `base_s * 2**n`, capped, with jitter."""

    backoff_base_s: float = Field(default=2.0, ge=0)
    backoff_cap_s: float = Field(default=300.0, ge=0)


class LimitSettings(Section):
    """The time a caller gives: it must end inside the caller's own limit, so that what was reached is not lost."""

    deadline_s: float | None = Field(default=None, gt=0)
    """From the call to the answer; without one only the limits of the parts count."""
    grade_s: float = Field(default=900.0, gt=0)
    """Of the deadline, kept for taking and grading the patch: the agent ends before it."""
    release_s: float = Field(default=30.0, gt=0)
    """Of the deadline, kept for giving the sandbox back: grading ends before it."""
    on_timeout: Literal["grade", "zero", "drop"] = "grade"
    """What an agent that ran out of time is worth: its patch's grade, 0.0, or nothing (the sample is dropped)."""

    @model_validator(mode="after")
    def _leaves_time(self) -> Self:
        if self.deadline_s is not None and self.deadline_s <= self.grade_s + self.release_s:
            raise ValueError(
                f"deadline_s {self.deadline_s:g} leaves the agent no time beside grade_s {self.grade_s:g} and"
                f" release_s {self.release_s:g}"
            )
        return self


class TrainingSettings(Section):
    """How a process behaves that a trainer calls."""

    on_systemic: Literal["drop", "exit"] = "drop"
    """When something is wrong that hits every rollout: go on answering "no reward", or end the process (code 78)."""
    exit_after_s: float = Field(default=900.0, gt=0)
    """So long without one valid rollout, while some were asked for, ends the process with `exit`."""
    episode_logs: bool = True
    """Write `LOG_DIR/<instance>/<rollout>/` for people, from what is stored."""
    freeze_gc: bool = True
    """Before the process's first rollout, take everything that is loaded by then out of garbage collections for good
    (`gc.freeze`): each full one would hold up the trainer's event loop for as long as it takes to look at all of it."""


class Settings(Section):
    """All effective settings of a rollout; holds no secret, so all of it is stored."""

    agent: AgentSettings = AgentSettings()
    llm: LlmSettings = LlmSettings()
    sandbox: SandboxSettings = SandboxSettings()
    grading: GradingSettings = GradingSettings()
    retry: RetrySettings = RetrySettings()
    limits: LimitSettings = LimitSettings()
    training: TrainingSettings = TrainingSettings()

    def to_json(self) -> str:
        """Return the canonical JSON that is stored and hashed."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))

    @property
    def sha256(self) -> str:
        """Digest of every effective setting."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()
