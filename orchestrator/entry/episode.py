"""Per-episode logs as people expect them, written from stored facts: `LOG_DIR/<instance>/<rollout id>/`.

A file is there whole or not at all; whatever is missing after a crash can be had from the store with `rollouts show`.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.provenance import Documents

_UNSAFE = re.compile(r"[^A-Za-z0-9._+=-]+")


async def write(found: Documents, rollout_id: str, log_dir: str) -> None:
    """Write `trajectory.jsonl`, `patch.diff` and `grade.log` where there is one, and `result.json` last."""
    files = {
        "trajectory.jsonl": found.transcript,
        "patch.diff": found.patch,
        "grade.log": found.test_log,
        "result.json": (json.dumps(found.result, indent=2, sort_keys=True) + "\n").encode(),
    }
    folder = Path(log_dir) / folder_name(found.instance_id) / rollout_id
    await asyncio.to_thread(_write_all, folder, files)


def folder_name(instance_id: str) -> str:
    """Return a name for a folder: an instance id comes from a data set, and may hold anything."""
    return _UNSAFE.sub("_", instance_id).strip(".")[:150] or "_"


def _write_all(folder: Path, files: dict[str, bytes | None]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        if data is not None:
            handle, part = tempfile.mkstemp(
                prefix=f".{name}.", dir=folder
            )  # several calls may have one rollout
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            Path(part).chmod(0o644)
            Path(part).replace(folder / name)
