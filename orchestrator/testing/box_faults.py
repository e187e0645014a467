"""Which faults the box service commits: drawn from a seed, and bounded, so that every run gets to its end."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

_SLOW_SHARE = 4
"""A call is slow so many times as often as it fails."""
_KINDS: dict[str, tuple[tuple[str, int], ...]] = {
    "create": (("instead", 503), ("after", 0), ("after", 500), ("later", 0), ("later", 0)),
    "delete": (("instead", 500), ("after", 500), ("after", 0)),
    "exec": (("instead", 503), ("after", 0)),
    "list": (("instead", 503), ("after", 0)),
}
_OFTEN = {"create": 5, "delete": 3}
"""How many times as often as others these fail: there are few of them."""
_LATER_S = (0.5, 3.0)
_OTHER: tuple[tuple[str, int], ...] = (("instead", 503),)


class When(StrEnum):
    """Whether the work that was asked for is done all the same."""

    INSTEAD = "instead"
    AFTER = "after"
    LATER = "later"
    """The caller is cut off at once, and the work begins when it has long given up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """What becomes of one call. `status` None: an honest answer; 0: the connection is dropped."""

    when: When = When.AFTER
    status: int | None = None
    before_s: float = 0.0
    """How late the work begins: a create that was cut off meanwhile still takes effect."""
    after_s: float = 0.0
    """How late the answer comes."""


class Faults:
    """Draws for every call whether it fails (with probability `rate`, or a multiple of it) and whether it is slow.

    Deletes fail at most once for a key; what else concerns an owner (a key without its last two parts) fails at most
    `most_per_owner` times, so that no budget for retries is used up by these faults alone.
    """

    def __init__(self, seed: int, *, rate: float, slow_ms: int, most_per_owner: int = 2) -> None:
        self._random = random.Random(seed)  # noqa: S311 - a test's choices
        self._rate = rate
        self._slow_s = slow_ms / 1000
        self._most = {"delete": 1, "list": 1}
        self._most_per_owner = most_per_owner
        self._count: Counter[tuple[str, str]] = Counter()

    def choose(self, op: str, key: str) -> Fault:
        """Return what happens to a call of this kind about this key."""
        draw, slow, share = self._random.random(), self._random.random(), self._random.random()
        before_s = after_s = 0.0
        if self._slow_s and slow < max(self._rate * _SLOW_SHARE, 0.05):
            held_s = self._slow_s * self._random.random()
            before_s, after_s = held_s * share, held_s * (1 - share)
        if draw >= self._rate * _OFTEN.get(op, 1) or not self._may_fail(op, key):
            return Fault(before_s=before_s, after_s=after_s)
        when, status = self._random.choice(_KINDS.get(op, _OTHER))
        if when == When.LATER:
            before_s = self._random.uniform(*_LATER_S)
        return Fault(when=When(when), status=status, before_s=before_s, after_s=after_s)

    def _may_fail(self, op: str, key: str) -> bool:
        counted = (op, key) if op in self._most else ("", key.rsplit("-", 2)[0])
        self._count[counted] += 1
        return self._count[counted] <= self._most.get(op, self._most_per_owner)
