"""What can be said of a rollout, put together from its rows: reward and stats, and the documents people read."""

from __future__ import annotations

from orchestrator.provenance.documents import Documents, gather_documents
from orchestrator.provenance.stats import (
    REWARD_FN,
    STATS,
    Facts,
    Stat,
    gather,
    reward_of,
    stats_of,
    stats_of_failure,
)

__all__ = [
    "REWARD_FN",
    "STATS",
    "Documents",
    "Facts",
    "Stat",
    "gather",
    "gather_documents",
    "reward_of",
    "stats_of",
    "stats_of_failure",
]
