"""Where a SQLite file may live, and the queue ticket beside it. PostgreSQL needs none of this."""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from store import errors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import sqlalchemy as sa

logger = logging.getLogger(__name__)

_SAY_AFTER_S, _SAY_EVERY_S = 5.0, 30.0
_POLL_S = 0.05

NETWORK_FILE_SYSTEMS = frozenset(
    {
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "smbfs",
        "lustre",
        "gpfs",
        "beegfs",
        "ceph",
        "9p",
        "afs",
        "glusterfs",
        "fuse.sshfs",
    }
)


def file_of(url: sa.URL) -> Path:
    """Return the database file of a SQLite URL."""
    return Path(str(url.database)).absolute()


MOUNTS = Path("/proc/mounts")


def check(path: Path, *, create: bool, mounts: Path = MOUNTS) -> None:
    """Refuse a path where a durable SQLite file cannot live, going by the kernel's table of mounts.

    Raises `StoreUnusable` naming the path and what to do; with `create`, makes the folder.
    """
    if create:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise errors.StoreUnusable(
                f"cannot make the folder of {path}: {e.strerror}", hint="choose another --db"
            ) from e
    elif not path.exists():
        raise errors.StoreUnusable(
            f"there is no database at {path}",
            hint="name one with --db sqlite:///PATH or ROLLOUTS_DATABASE_URL",
        )
    kind = file_system(path.parent, mounts)
    if kind in NETWORK_FILE_SYSTEMS:
        raise errors.StoreUnusable(
            f"{path} is on a network file system ({kind}), where SQLite loses data",
            hint="set --db or ROLLOUTS_DATABASE_URL to a file on a local disk",
        )
    if path.is_dir():
        raise errors.StoreUnusable(f"{path} is a folder, not a database", hint="name a file in it")
    if path.exists() and path.stat().st_size:
        with path.open("rb") as f:
            if f.read(16) != b"SQLite format 3\0":
                raise errors.StoreUnusable(f"{path} is not a SQLite database", hint="choose another --db")
    if create and not os.access(path if path.exists() else path.parent, os.W_OK):
        raise errors.StoreUnusable(
            f"{path} cannot be written", hint="choose another --db or mend its permissions"
        )


def file_system(folder: Path, mounts: Path) -> str:
    """Return the kind of file system that a folder lies on, by the kernel's table of mounts."""
    resolved = folder.resolve()
    best, kind = -1, ""
    for line in mounts.read_text(encoding="utf-8").splitlines():
        mount, fs = line.split()[1:3]
        if resolved.is_relative_to(mount.replace("\\040", " ")) and len(mount) > best:
            best, kind = len(mount), fs
    return kind


def never() -> bool:
    """Give up never."""
    return False


class Turns:
    """Gives one thread its turns at a database file, through a queue ticket: a lock file of its own beside it.

    Without it processes would starve each other. The file stays open from turn to turn: opening it would cost a lone
    write more than the lock.
    """

    def __init__(self, path: Path) -> None:
        self._lock = f"{path}.lock"
        self._fd = -1
        _let_go_in_forked_children()

    @contextmanager
    def __call__(self, given_up: Callable[[], bool] = never) -> Iterator[None]:
        """Hold the ticket. Waits until its turn comes or `given_up`, asked now and again, says true.

        Then it raises `StoreUnreachable`.
        """
        if self._fd not in _open:
            self._fd = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            _open.add(self._fd)
        try:
            if not _taken(self._fd):
                _queue_up(self._fd, self._lock, given_up)
        except BaseException:
            self.close()  # who still waits for the same open file would get the turn for it
            raise
        try:
            yield
        finally:
            if self._fd in _open:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Let go of the file; the next turn opens it anew."""
        if self._fd in _open:
            _open.remove(self._fd)
            os.close(self._fd)


_open: set[int] = set()
"""Descriptors of lock files."""


@cache
def _let_go_in_forked_children() -> None:
    """Close them in every child: one that outlives its killed parent would keep the lock for ever."""

    def close() -> None:
        while _open:
            os.close(_open.pop())

    os.register_at_fork(after_in_child=close)


def _taken(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _queue_up(fd: int, lock: str, given_up: Callable[[], bool]) -> None:
    """Wait in the queue, through a thread that can be left behind: it holds nothing once its descriptor is closed."""
    its_turn = threading.Event()
    same = os.dup(fd)

    def wait() -> None:
        try:
            fcntl.flock(same, fcntl.LOCK_EX)
            its_turn.set()
        finally:
            os.close(same)

    threading.Thread(target=wait, name="ticket-queue", daemon=True).start()
    say_s = time.monotonic() + _SAY_AFTER_S
    while not its_turn.wait(_POLL_S):
        if given_up():
            raise errors.StoreUnreachable(
                f"the database's turn did not come: another process holds {lock}",
                hint=f"find it with `fuser {lock}` and end it; do not remove the file",
            )
        if time.monotonic() >= say_s:
            say_s = time.monotonic() + _SAY_EVERY_S
            logger.warning("waiting for another process that holds %s", lock)
