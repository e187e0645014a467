"""The driver: walks one claimed rollout through its states, one durable fact after the other."""

from __future__ import annotations

from orchestrator.rollout.driver import advance, answer, run, withdraw
from orchestrator.rollout.handover import Handover
from orchestrator.rollout.runtime import Ending, Runtime
from orchestrator.rollout.stored_input import StoredInput, part_of
from orchestrator.rollout.submission import Request, submit

__all__ = [
    "Ending", "Handover", "Request", "Runtime", "StoredInput", "advance", "answer", "part_of", "run", "submit", "withdraw",
]  # fmt: skip
