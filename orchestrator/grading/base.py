"""What grading hands on: the patch as taken, and the verdict with its evidence."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.errors import GradeOutcome

GRADER = "eval"
GRADER_VERSION = "1"
"""Rises with every change that could change a verdict."""


class Extraction(StrEnum):
    """How taking the patch went; only `ok` has bytes."""

    OK = "ok"
    EMPTY = "empty"
    FAILED = "extract_failed"
    TIMEOUT = "extract_timeout"
    INCOMPLETE = "extract_incomplete"
    TOO_LARGE = "patch_too_large"


@dataclass(frozen=True, kw_only=True, slots=True)
class Patch:
    """A patch exactly as git printed it, against the sandbox's base commit."""

    data: bytes
    """Empty when the agent changed nothing."""
    base_commit: str
    paths: list[str] = field(default_factory=list)
    insertions: int = 0
    deletions: int = 0
    notes: list[str] = field(default_factory=list)
    """What was left out and why: files ignored by the base, files of ours, special files."""

    @property
    def sha256(self) -> str:
        """Digest of the bytes."""
        return hashlib.sha256(self.data).hexdigest()


class Evidence(StrEnum):
    """What a verdict rests on, strongest first; everything but `junit` is weak and shown as such."""

    JUNIT = "junit"
    EXPECTED_MAP = "expected_map"
    LOG_TEXT = "log_text"
    EXIT_CODE = "exit_code"
    NONE = "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class Grade:
    """One grading attempt: what was found and everything needed to see why."""

    outcome: GradeOutcome
    evidence: Evidence
    tests: dict[str, str] = field(default_factory=dict)
    """Test id -> PASSED | FAILED | ERROR | SKIPPED | XFAIL | XPASS | MISSING."""
    f2p_pass: int = 0
    f2p_total: int = 0
    p2p_pass: int = 0
    p2p_total: int = 0
    exit_code: int | None = None
    """Of the test command itself, not of the script around it; None when it was killed."""
    duration_s: float = 0.0
    log: bytes = b""
    flags: list[str] = field(default_factory=list)
    error_class: str | None = None
    error_text: str | None = None


def grader_digest(eval_sha256: str, settings: str) -> str:
    """Identify a grader: sha256 over its name, version, settings (canonical JSON) and what it evaluates."""
    return hashlib.sha256(f"{GRADER}\n{GRADER_VERSION}\n{settings}\n{eval_sha256}".encode()).hexdigest()
