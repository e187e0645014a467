"""While `agent_running`: let the agent work, then take what it left as a patch, however it ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator import errors
from orchestrator.agents import registry
from orchestrator.grading import extract
from orchestrator.sandbox import repository

if TYPE_CHECKING:
    from orchestrator.agents.base import AgentExit, AgentRun
    from orchestrator.grading.base import Patch
    from orchestrator.settings import GradingSettings, LlmSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """How the agent ended and what it left."""

    exit: AgentExit
    patch: Patch


async def work(run: AgentRun, llm: LlmSettings, base_commit: str, settings: GradingSettings) -> Finished:
    """Run the agent to its end and extract the patch.

    Raises what the agent raises, `errors.ExtractFailed`, or `errors.SandboxLost`.
    """
    ended = await registry.make(run.settings.type, llm).run(run)
    await run.sandbox.stop()
    await repository.restore_git(run.sandbox)
    _, patch = await extract.take_patch(
        run.sandbox,
        base_commit=base_commit,
        limit_bytes=settings.patch_limit_bytes,
        timeout_s=settings.extract_timeout_s,
    )
    if ended.reason is errors.ExitReason.AGENT_DESTROYED_SANDBOX and not patch.data:
        raise errors.SandboxLost("the agent destroyed its sandbox and left nothing to extract")
    return Finished(exit=ended, patch=patch)
