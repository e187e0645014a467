"""Reading and writing a sandbox's files from the worker without ever leaving the sandbox.

Every path is resolved the way the sandbox would resolve it, one component at a time with no-follow opens, so that a
hostile link leads to where it leads inside, never into this machine. Blocking; callers use a thread.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from orchestrator.sandbox.isolation import Mount

_MAX_LINKS = 40
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CHUNK = 1024 * 1024


@dataclass(frozen=True, slots=True)
class _Place:
    """A directory, open, and the name in it that a path leads to."""

    folder: int
    name: str
    writable: bool


class ConfinedFiles:
    """The files that a list of mounts shows; a later mount covers an earlier one."""

    def __init__(self, mounts: Sequence[Mount], links: Sequence[tuple[str, str]] = ()) -> None:
        self._mounts = sorted(mounts, key=lambda m: m.inside.count("/"), reverse=True)
        self._links = dict(links)

    def read(self, path: str, limit: int) -> bytes:
        """Return a regular file's bytes; `FileNotFoundError` without one, `ValueError` beyond `limit`."""
        with self._place(path, make_parents=False) as place:
            try:
                fd = os.open(
                    place.name,
                    os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC,
                    dir_fd=place.folder,
                )
            except OSError as error:
                if error.errno in {errno.ELOOP, errno.ENXIO, errno.ENOTDIR}:
                    raise _no_file(path) from error
                raise
            with os.fdopen(fd, "rb") as file:
                status = os.fstat(fd)
                if not stat.S_ISREG(status.st_mode):
                    raise _no_file(path)
                data = b"" if status.st_size > limit else file.read(limit + 1)
                if status.st_size > limit or len(data) > limit:
                    raise ValueError(f"{path} is larger than {limit} bytes")
                return data

    def write(self, path: str, data: bytes, mode: int) -> None:
        """Replace a file in one step, making its parent directories; links are followed as inside the sandbox."""
        with self._place(path, make_parents=True) as place:
            if not place.writable:
                raise PermissionError(errno.EACCES, "read-only in this sandbox", path)
            temporary = f".{secrets.token_hex(8)}.tmp"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(temporary, flags, 0o600, dir_fd=place.folder)
            try:
                with os.fdopen(fd, "wb") as file:
                    file.write(data)
                    os.fchmod(fd, mode)
                os.rename(temporary, place.name, src_dir_fd=place.folder, dst_dir_fd=place.folder)
            except OSError:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary, dir_fd=place.folder)
                raise

    @contextlib.contextmanager
    def _place(self, path: str, *, make_parents: bool) -> Iterator[_Place]:
        """Resolve every link on the way; what is yielded is a name that is no link, in an open directory."""
        if not path.startswith("/") or "\0" in path:
            raise ValueError(f"not an absolute path: {path!r}")
        pending = path.split("/")[::-1]
        resolved: list[str] = []
        links = 0
        while pending:
            part = pending.pop()
            if part in {"", "."}:
                continue
            if part == "..":
                resolved = resolved[:-1]
                continue
            target = self._link_target([*resolved, part])
            if target is None:
                resolved.append(part)
                continue
            links += 1
            if links > _MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            if target.startswith("/"):
                resolved = []
            pending += target.split("/")[::-1]
        if not resolved:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        yield from self._open_parent(resolved, path, make_parents=make_parents)

    def _open_parent(self, resolved: list[str], path: str, *, make_parents: bool) -> Iterator[_Place]:
        found = self._mount_of(resolved)
        if found is None:
            raise _no_file(path)
        mount, inner = found
        if not inner:  # a single mounted file, or a mounted folder itself
            outside = Path(mount.outside)
            folder = os.open(outside.parent, _DIRECTORY)
            name, writable = outside.name, False
        else:
            folder = self._walk(mount, inner[:-1], path, make=make_parents and mount.writable)
            name, writable = inner[-1], mount.writable
        try:
            yield _Place(folder, name, writable)
        finally:
            os.close(folder)

    def _mount_of(self, resolved: Sequence[str]) -> tuple[Mount, list[str]] | None:
        for mount in self._mounts:
            prefix = mount.inside.strip("/").split("/")
            if list(resolved[: len(prefix)]) == prefix:
                return mount, list(resolved[len(prefix) :])
        return None

    def _link_target(self, resolved: list[str]) -> str | None:
        root_link = self._links.get("/" + "/".join(resolved))
        if root_link is not None:
            return root_link
        found = self._mount_of(resolved)
        if found is None or not found[1]:
            return None
        mount, inner = found
        try:
            folder = self._walk(mount, inner[:-1], "/".join(resolved), make=False)
        except FileNotFoundError:
            return None
        try:
            return os.readlink(inner[-1], dir_fd=folder)
        except OSError:
            return None
        finally:
            os.close(folder)

    @staticmethod
    def _walk(mount: Mount, parts: Sequence[str], path: str, *, make: bool) -> int:
        """Open the directory `parts` below a mount, no link followed on the way."""
        fd = os.open(mount.outside, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        for part in parts:
            try:
                if make:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, 0o755, dir_fd=fd)
                inner = os.open(part, _DIRECTORY, dir_fd=fd)
            except OSError as error:
                if error.errno in {errno.ELOOP, errno.ENOTDIR, errno.ENOENT}:
                    raise _no_file(path) from error
                raise
            finally:
                os.close(fd)
            fd = inner
        return fd


def _no_file(path: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, "no regular file", path)
