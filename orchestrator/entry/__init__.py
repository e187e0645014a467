"""A trainer's way in: one call per rollout on a worker's single event loop, sharing one store and its sandboxes."""

from __future__ import annotations

from orchestrator.entry.call import Call
from orchestrator.entry.run import Answer, answer, close, run_record

__all__ = ["Answer", "Call", "answer", "close", "run_record"]
