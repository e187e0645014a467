"""Take the agent's work as a patch: every byte it left that the base does not ignore, or an error that says why not.

The diff is made between two trees of our own (`sandbox.repository`), so no index, history, configuration, hook or
attribute of the agent's can hide, bend or execute anything.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from orchestrator import errors
from orchestrator.grading.base import Extraction, Patch
from orchestrator.sandbox import repository

if TYPE_CHECKING:
    from orchestrator.sandbox.base import CommandResult, Sandbox

NOTES_PER_KIND = 20
_REPORT_LIMIT = 64 * 1024 * 1024
_EXIT_VALUES = {23: Extraction.INCOMPLETE, 30: Extraction.TOO_LARGE}


@dataclass(slots=True)
class _Report:
    size: int = -1
    sha256: str = ""
    paths: list[str] = field(default_factory=list)
    insertions: int = 0
    deletions: int = 0
    notes: dict[str, list[str]] = field(default_factory=dict)


async def take_patch(
    sandbox: Sandbox, *, base_commit: str, limit_bytes: int, timeout_s: float
) -> tuple[Extraction, Patch]:
    """Stop the agent's processes and return its changes against the base; `repository.hide_git` must have run.

    The result is `ok`, or `empty` with no bytes. Raises `errors.ExtractFailed` (its `value` names the extraction
    result) for everything else, never a shortened patch, and `errors.SandboxLost` when the sandbox is gone.
    """
    await sandbox.stop()
    result = await repository.run_script(
        sandbox,
        repository.script("orchestrator.grading", "extract.sh"),
        arguments=(base_commit, str(limit_bytes)),
        timeout_s=timeout_s,
    )
    if result.exit_code != 0:
        raise _failure(sandbox, result, limit_bytes)
    try:
        report = _parse_report(await sandbox.read(f"{sandbox.private_dir}/out/report", limit=_REPORT_LIMIT))
        data = await sandbox.read(f"{sandbox.private_dir}/out/patch", limit=limit_bytes + 1)
    except (FileNotFoundError, ValueError) as error:
        raise errors.ExtractFailed(
            f"sandbox {sandbox.key}: the patch could not be read: {error}", value=Extraction.FAILED
        ) from error
    _check_transfer(sandbox, report, data)
    patch = Patch(
        data=data,
        base_commit=base_commit,
        paths=report.paths,
        insertions=report.insertions,
        deletions=report.deletions,
        notes=_write_notes(report.notes),
    )
    return (Extraction.OK if data else Extraction.EMPTY), patch


def _failure(sandbox: Sandbox, result: CommandResult, limit_bytes: int) -> errors.ExtractFailed:
    if result.timed_out:
        return errors.ExtractFailed(
            f"sandbox {sandbox.key}: taking the patch took longer than {result.duration_s:.0f} s",
            value=Extraction.TIMEOUT,
            hint="raise grading.extract_timeout_s if the repository is that large",
        )
    value = _EXIT_VALUES.get(result.exit_code or 0, Extraction.FAILED)
    if value is Extraction.TOO_LARGE:
        names = result.output[-2000:].decode("utf-8", "backslashreplace").strip()
        return errors.ExtractFailed(
            f"sandbox {sandbox.key}: the patch is larger than {limit_bytes} bytes; largest files: {names}",
            value=value,
            hint="raise grading.patch_limit_bytes if patches may be that large",
        )
    return errors.ExtractFailed(
        f"sandbox {sandbox.key}: the patch could not be taken whole ({repository.describe(result)})",
        value=value,
    )


def _check_transfer(sandbox: Sandbox, report: _Report, data: bytes) -> None:
    digest = hashlib.sha256(data).hexdigest()
    if len(data) != report.size or digest != report.sha256:
        raise errors.ExtractFailed(
            f"sandbox {sandbox.key}: the patch changed on its way: {report.size} bytes with sha256 {report.sha256} "
            f"were sent, {len(data)} bytes with sha256 {digest} arrived",
            value=Extraction.FAILED,
        )


def _parse_report(data: bytes) -> _Report:
    report = _Report()
    for record in data.split(b"\0"):
        key, _, value = record.partition(b"\t")
        text = value.decode("utf-8", "backslashreplace")
        if key == b"size":
            report.size = int(text)
        elif key == b"sha256":
            report.sha256 = text
        elif key == b"change":
            inserted, deleted, path = text.split("\t", 2)
            report.paths.append(path)
            report.insertions += int(inserted) if inserted != "-" else 0
            report.deletions += int(deleted) if deleted != "-" else 0
        elif key == b"note":
            kind, _, path = text.partition("\t")
            report.notes.setdefault(kind, []).append(path)
    return report


def _write_notes(notes: dict[str, list[str]]) -> list[str]:
    lines: list[str] = []
    for kind, paths in notes.items():
        lines.extend(f"{kind}: {path}" for path in paths[:NOTES_PER_KIND])
        if len(paths) > NOTES_PER_KIND:
            lines.append(f"{kind}: {len(paths) - NOTES_PER_KIND} more")
    return lines
