"""What can go wrong with the store itself, as decisions a caller can take.

StoreError
|-- StoreUnusable      this database can never work as it is (path, file, schema, file system): exit 2
|-- StoreUnreachable   it cannot be asked right now; the outcome of a pending write is unknown
|   `-- NeverReached   nor could it be when it was to be opened, so that nothing was started: exit 2
|-- Damaged            one stored fact is missing or cannot be read; everything else can
|-- Conflict           the same key was submitted with another request, or a stored fact contradicts a new one
|-- StoreClosed        a write after close: a programming error
`-- IllegalTransition  the edge does not exist: a programming error
"""

from __future__ import annotations


class StoreError(Exception):
    """Base of everything the store raises; `hint` is the next step, in the imperative, and may be empty."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class StoreUnusable(StoreError):
    """The database cannot be used as it is."""


class StoreUnreachable(StoreError, ConnectionError):
    """The database did not answer; re-read before assuming anything about a pending write."""


class NeverReached(StoreUnreachable):
    """The database did not answer, or let nobody in, when it was to be opened."""


class Damaged(StoreError):
    """A stored fact is missing or cannot be read."""


class Conflict(StoreError):
    """A new fact contradicts a stored one."""


class StoreClosed(StoreError):
    """The store was closed before this call."""


class IllegalTransition(StoreError):
    """The state machine has no such edge from where the rollout is."""
