"""While `sandbox_ready`: take the repository's history out of the agent's reach."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.sandbox import repository

if TYPE_CHECKING:
    from orchestrator.sandbox.base import Sandbox
    from orchestrator.tasks.record import Task


async def prepare(task: Task, sandbox: Sandbox) -> str:
    """Keep a pristine copy of the repository, hide `.git` unless the task needs it, return the base commit."""
    take = repository.hide_git if task.hide_git else repository.keep_pristine
    return await take(sandbox)
