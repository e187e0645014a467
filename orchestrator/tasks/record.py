"""The one form of a task that the rest of the code sees; `dialects` makes it from whatever a data set calls things."""

from __future__ import annotations

import base64
import hashlib
import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer


def _decode(value: object) -> object:
    return base64.b64decode(value, validate=True) if isinstance(value, str) else value


Base64Bytes = Annotated[
    bytes,
    BeforeValidator(_decode),
    PlainSerializer(lambda b: base64.b64encode(b).decode("ascii"), return_type=str, when_used="json"),
]
"""Bytes in Python, base64 text in JSON, so that line ends and encodings survive storage."""


class DatasetKind(StrEnum):
    """Which public record format a task came in."""

    SWEBENCH = "swebench"
    SWEBENCH_V5 = "swebench_v5"
    SWEGYM = "swegym"
    SWESMITH = "swesmith"
    R2E = "r2e"
    SWELIVE = "swelive"
    REBENCH = "rebench"
    SWEPRO = "swepro"
    SCALESWE = "scaleswe"
    SLIME = "slime"
    AREAL = "areal"
    LOCAL = "local"


class Frozen(BaseModel):
    """Base of the stored records: immutable, and an unknown field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class RepoSource(Frozen):
    """Where a local sandbox gets the base tree from. The paths are this machine's and take no part in digests."""

    kind: Literal["archive", "git", "tree"]
    path: Path
    """A tar archive without `.git`, a git repository that holds `base_commit`, or a plain folder."""
    sha256: str | None = None
    """Of the archive's bytes; checked before every use when present."""


class Task(Frozen):
    """A normalised SWE-bench-style task (reference: the SWE-bench, SWE-Gym, R2E-Gym, ... record formats).

    Everything from `test_patch` on is for the grader only and never reaches an agent, its sandbox or its prompt.
    """

    instance_id: str
    """Not unique within an epoch: never the key of a rollout."""
    dataset_kind: DatasetKind
    repo: str = ""
    base_commit: str | None = None
    workdir: str
    image: str | None = None
    repo_source: RepoSource | None = None
    pre_commands: str = ""
    """Shell text that runs first in both sandboxes, before the base snapshot is taken."""
    problem_statement: str
    hide_git: bool = True
    timeout_s: float = 1800.0
    """Limit of the test command."""
    import_roots: tuple[str, ...] = (".",)
    """Folders below `workdir` that the strict test command puts on the import path."""
    targets: tuple[str, ...] = ()
    """Files or folders handed to pytest by the strict command; empty means the files of the listed tests."""
    strict: bool = False
    """The test command is ours (pytest, read as JUnit) instead of the record's."""
    allow_conftest: tuple[str, ...] = ()

    test_patch: Base64Bytes | None = None
    f2p_script: str | None = None
    f2p_mode: Literal["place", "execute"] | None = None
    eval_script: str | None = None
    fail_to_pass: tuple[str, ...] = ()
    pass_to_pass: tuple[str, ...] = ()
    known_failing: tuple[str, ...] = ()
    expected_status: dict[str, str] | None = None
    """R2E-Gym: the whole map of test name to status that must come out."""
    log_parser: str | None = None
    eval_type: Literal["pass_and_fail", "fail_only"] = "pass_and_fail"
    test_assets: dict[str, Base64Bytes] = {}
    """Files the grader places in the work tree: path below `workdir` to bytes."""
    gold_patch: Base64Bytes | None = None
    extra: dict[str, Any] = {}
    """Every key of the record that nothing else reads."""

    def to_json(self) -> str:
        """Return the canonical JSON that is stored: sorted keys, no blanks."""
        return json.dumps(
            self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), ensure_ascii=False
        )

    @property
    def sha256(self) -> str:
        """Digest of the record without this machine's paths: equal for equal tasks in any dialect or folder."""
        record = self.model_dump(mode="json")
        if record["repo_source"] is not None:
            record["repo_source"].pop("path")
        text = json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def eval_sha256(self) -> str:
        """Digest of everything that decides the verdict: scripts, test patch, lists and how they are run."""
        decisive = self.model_dump(
            mode="json",
            include={
                "test_patch", "f2p_script", "f2p_mode", "eval_script", "fail_to_pass", "pass_to_pass",
                "known_failing", "expected_status", "log_parser", "eval_type", "test_assets", "strict",
                "targets", "import_roots", "allow_conftest",
            },
        )  # fmt: skip
        return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()
