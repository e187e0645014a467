"""The samples of a command as chains: a rollout that failed is followed by a successor, and the newest one counts.

A chain is what one run holds of one sample of one task under one configuration, numbered by `retry_no`. Which successor
comes next follows from the rollout that failed alone, so that two processes at the same chain mean the same rollout.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from orchestrator import rollout
from orchestrator.errors import FailureClass
from orchestrator.states import TERMINAL, State

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from orchestrator.rollout import Request, Runtime
    from store.history import Record

Key = tuple[str, str, int]
"""Digest of the task, digest of the settings, sample."""

_HOPELESS = frozenset({FailureClass.TASK_INVALID})
"""Failures that every successor would repeat."""
_FINAL_IN_THE_CALL = _HOPELESS | {FailureClass.CANCELLED}
"""What a person cancelled stays so until a person asks for it anew."""


@dataclass(kw_only=True, slots=True)
class _Chain:
    request: Request
    """The sample as it was asked for; its successors differ in number and parent."""
    last_no: int
    """The highest retry number that this call may submit."""
    newest: str = ""
    """The rollout that counts; empty before the sample was ever submitted."""
    retry_no: int = 0
    counted_as: str = ""
    """The first rollout of the chain that this call worked on."""


def key_of(row: Record) -> Key:
    """Return the chain that a row of `History.overview` belongs to."""
    return row["task_sha256"], row["config_sha256"], row["sample"]


def newest_of_each(rows: Iterable[Record]) -> dict[Key, Record]:
    """Return for each chain the row with the highest retry number."""
    found: dict[Key, Record] = {}
    for row in rows:
        key = key_of(row)
        if key not in found or row["retry_no"] > found[key]["retry_no"]:
            found[key] = row
    return found


def _key(request: Request) -> Key:
    return request.task.sha256, request.settings.sha256, request.sample


def _next(chain: _Chain) -> Request:
    return replace(chain.request, retry_no=chain.retry_no + 1, parent_id=chain.newest)


class Chains:
    """What a command asks for, against what its run holds: `rows` of `History.overview`.

    A sample gets at most `retries` successors from one `Chains`.
    """

    def __init__(self, requests: Sequence[Request], rows: Iterable[Record], *, retries: int) -> None:
        self._chains: dict[Key, _Chain] = {}
        self._of: dict[str, _Chain] = {}
        self.missing: list[Request] = []
        """What is to be submitted first: samples that the run does not hold, and successors of failed ones."""
        self.is_over = True
        """True when the run holds an answer for every sample, so that neither sandbox nor model is needed."""
        newest = newest_of_each(rows)
        for request in requests:
            row = newest.get(_key(request))
            first_no = 0 if row is None else row["retry_no"]
            chain = _Chain(request=request, last_no=first_no + retries)
            self._chains[_key(request)] = chain
            if row is None:
                self.missing.append(request)
                continue
            self._append(chain, row["id"], row["retry_no"])
            self.is_over &= row["state"] in TERMINAL
            if row["state"] == State.FAILED and retries and row["failure_class"] not in _HOPELESS:
                self.missing.append(_next(chain))
                chain.counted_as = ""  # nothing is done with the failed one any more
        self.is_over &= not self.missing

    @property
    def ids(self) -> list[str]:
        """The rollout that counts for each sample, in the order asked for; samples never submitted have none."""
        return [chain.newest for chain in self._chains.values() if chain.newest]

    def has(self, row: Record) -> bool:
        """Say whether a row belongs to a sample that was asked for."""
        return key_of(row) in self._chains

    def counted_as(self, rollout_id: str) -> str:
        """Return what stands for a rollout's sample as long as this call lasts, whatever its successors are called."""
        chain = self._of.get(rollout_id)
        return rollout_id if chain is None else chain.counted_as

    def successor(self, rollout_id: str, failure_class: str | None) -> Request | None:
        """Return what follows a rollout that has just failed; None when nothing does."""
        chain = self._of.get(rollout_id)
        if chain is None or chain.newest != rollout_id or failure_class is None:
            return None
        if failure_class in _FINAL_IN_THE_CALL or chain.retry_no >= chain.last_no:
            return None
        return _next(chain)

    async def submit(self, runtime: Runtime, requests: Sequence[Request]) -> list[str]:
        """Store rollouts, or attach to them where another process was faster; they count from now on."""
        stored = await rollout.submit(runtime, requests) if requests else []
        for request, (rollout_id, _) in zip(requests, stored, strict=True):
            self._append(self._chains[_key(request)], rollout_id, request.retry_no)
        return [rollout_id for rollout_id, _ in stored]

    def catch_up(self, rows: Iterable[Record]) -> None:
        """Go on from successors that other processes submitted meanwhile."""
        for key, row in newest_of_each(rows).items():
            chain = self._chains.get(key)
            if chain is not None and row["retry_no"] > chain.retry_no:
                self._append(chain, row["id"], row["retry_no"])

    def _append(self, chain: _Chain, rollout_id: str, retry_no: int) -> None:
        chain.newest, chain.retry_no = rollout_id, retry_no
        chain.counted_as = chain.counted_as or rollout_id
        self._of[rollout_id] = chain
