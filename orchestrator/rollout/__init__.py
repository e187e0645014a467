"""The driver: walks one claimed rollout through its states, one durable fact after the other."""

from __future__ import annotations

from orchestrator.rollout.driver import advance, answer, run, withdraw
from orchestrator.rollout.handover import Handover
from orchestrator.rollout.runtime import Ending, Runtime
from orchestrator.rollout.submission import Request, submit

__all__ = ["Ending", "Handover", "Request", "Runtime", "advance", "answer", "run", "submit", "withdraw"]
