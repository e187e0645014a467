"""The folder that local sandboxes lie in, as an authority that can be named in a ledger row and found again from it.

Workers of one machine need not share a root: `TMPDIR` differs, containers have a `/tmp` each. That a folder is missing
under one root proves nothing about another, so the name tells the root itself apart from every other.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from orchestrator import errors

logger = logging.getLogger(__name__)

KEY = re.compile(r"[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?")
"""What a sandbox's folder may be called."""
PROBE_PREFIX = ".preflight-"
"""How the throw-away folders begin in which isolation is tried out; no sandbox key begins so."""
_PROBE_KEPT_S = 600.0
_KIND = "local"
_FIELDS = 5
_DELETE_S = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A root as it was found through its name."""

    ref: str
    root: Path
    rebooted: bool
    """The machine has started again since the name was given, so no process of that time is left."""
    there: bool
    """The root still exists; only a reboot explains that it does not."""

    def folder(self, key: str) -> Path:
        """Return the folder of a sandbox; raises `errors.UsageError` for what is no key."""
        return folder_of(self.root, key)


def folder_of(root: Path, key: str) -> Path:
    """Return the folder of a sandbox in a root; raises `errors.UsageError` for what is no key."""
    if not KEY.fullmatch(key):
        raise errors.UsageError(f"not a sandbox key: {key!r}")
    return root / key


def make_root(root: Path) -> None:
    """Make the root unless it is there, readable for nobody else. Raises `errors.UsageError` for somebody else's."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_ours(root):
        raise errors.UsageError(
            f"{root} belongs to somebody else", hint="set sandbox.root to a folder of your own"
        )
    root.chmod(0o700)


def name(root: Path) -> str:
    """Return the authority over an existing root: `local:HOST:BOOT_ID:DEVICE-INODE:PATH`."""
    return f"{_KIND}:{socket.gethostname()}:{_boot_id()}:{_identity(root)}:{root}"


def locate(ref: str) -> Place:
    """Find the root of that name, whoever gave it.

    Raises `errors.SandboxLost` when this process cannot say anything about it: another machine's, another folder by
    now at that path, or none that is visible from here.
    """
    fields = ref.split(":", _FIELDS - 1)
    if len(fields) != _FIELDS or fields[0] != _KIND or not fields[4].startswith("/"):
        raise _not_asked(ref, "it does not name a folder of local sandboxes")
    _, host, boot_id, identity, path = fields
    root = Path(path)
    if host != socket.gethostname():
        raise _not_asked(ref, f"this is the machine {socket.gethostname()}")
    there = os.path.lexists(root)
    if boot_id != _boot_id():
        if there and not _is_ours(root):
            raise _not_asked(ref, f"{root} belongs to somebody else now")
        return Place(ref=ref, root=root, rebooted=True, there=there)
    if not there:
        raise _not_asked(ref, f"{root} is not visible here")
    if _identity(root) != identity or not _is_ours(root):
        raise _not_asked(ref, f"{root} is another folder here")
    return Place(ref=ref, root=root, rebooted=False, there=True)


def _not_asked(ref: str, reason: str) -> errors.SandboxLost:
    return errors.SandboxLost(
        f"the authority {ref} cannot be asked from here: {reason}",
        hint="run the command on the machine, and with the view of its folders, that made the sandbox; if they are gone for"
        " good, see `rollouts clean --write-off`",
    )


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _identity(root: Path) -> str:
    status = root.lstat()
    return f"{status.st_dev}-{status.st_ino}"


def _is_ours(root: Path) -> bool:
    return root.is_dir() and not root.is_symlink() and root.lstat().st_uid == os.geteuid()


def stale_probes(root: Path) -> list[Path]:
    """Return the folders of tries that nobody is making any more: their worker was killed in the middle. Blocking."""
    oldest = time.time() - _PROBE_KEPT_S
    found = []
    for entry in root.iterdir():
        if entry.name.startswith(PROBE_PREFIX):
            try:
                changed = entry.lstat().st_mtime
            except FileNotFoundError:  # its own worker was quicker
                continue
            if changed < oldest:
                found.append(entry)
    return found


def delete(folder: Path) -> None:
    """Delete a tree of any depth and any permissions, following no link. Blocking.

    Raises `OSError` when something is left.
    """
    if not os.path.lexists(folder):
        return
    remove = ["rm", "-rf", "--one-file-system", "--", str(folder)]
    problem = _run(remove)
    if problem:
        _run(["chmod", "-R", "u+rwx", "--", str(folder)])
        problem = _run(remove)
    if os.path.lexists(folder):
        raise OSError(f"{folder} is still there: {problem or 'nobody says why'}")


def _run(argv: list[str]) -> str:
    """Return what went wrong, or an empty text."""
    try:
        ran = subprocess.run(argv, check=False, capture_output=True, timeout=_DELETE_S)
    except subprocess.TimeoutExpired:
        return f"{argv[0]} took longer than {_DELETE_S:g} s"
    return ran.stderr[-500:].decode(errors="replace").strip() if ran.returncode else ""
