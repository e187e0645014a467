"""Base trees as git sees them: one commit that is the same on every machine, and patches against it."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

from orchestrator import errors

GIT_TIMEOUT_S = 120.0

DIFF = (
    "diff", "--cached", "--binary", "--full-index", "--no-ext-diff", "--no-textconv", "--no-color", "--no-renames",
    "--src-prefix=a/", "--dst-prefix=b/",
)  # fmt: skip

_ENVIRONMENT = {
    "PATH": os.defpath,
    "HOME": "/nonexistent",
    "LC_ALL": "C",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_AUTHOR_NAME": "t",
    "GIT_AUTHOR_EMAIL": "t@t",
    "GIT_AUTHOR_DATE": "2000-01-01T00:00:00Z",
    "GIT_COMMITTER_NAME": "t",
    "GIT_COMMITTER_EMAIL": "t@t",
    "GIT_COMMITTER_DATE": "2000-01-01T00:00:00Z",
}
"""Fixed names and dates make the commit id a function of the tree; no configuration of the user takes part."""


class Snapshot:
    """A folder with its base commit; the repository lies beside the folder, never in it."""

    def __init__(self, tree: Path, git_dir: Path) -> None:
        """Record the folder's present content as the only commit of a new repository."""
        self.tree = tree.resolve()
        self.git_dir = git_dir.resolve()
        self._git("init", "--quiet", "--initial-branch=main", "--template=")
        self._git("add", "--all")
        self._git("commit", "--quiet", "--allow-empty", "--no-verify", "--message=base")
        self.commit = self._git("rev-parse", "HEAD").decode().strip()

    def diff(self) -> bytes:
        """Return what has changed in the folder since, as a patch."""
        # A fresh index: one that remembers times and sizes misses a change that keeps both.
        with tempfile.TemporaryDirectory() as folder:
            index = str(Path(folder, "index"))
            self._git("read-tree", self.commit, index=index)
            self._git("add", "--all", index=index)
            return self._git(*DIFF, self.commit, index=index)

    def restore(self) -> None:
        """Put the folder back to the base commit."""
        self._git("read-tree", "--reset", "HEAD")
        self._git("checkout-index", "--all", "--force")
        self._git("clean", "--quiet", "-d", "--force", "-x")

    def files(self) -> list[str]:
        """Return the paths of the base commit."""
        return [
            name.decode(errors="surrogateescape") for name in self._git("ls-files", "-z").split(b"\0") if name
        ]

    def _git(self, *arguments: str, index: str | None = None) -> bytes:
        program = shutil.which("git")
        if program is None:
            raise errors.RecordRefused("git is not installed", hint="install git")
        environment = _ENVIRONMENT | {"GIT_DIR": str(self.git_dir), "GIT_WORK_TREE": str(self.tree)}
        if index is not None:
            environment["GIT_INDEX_FILE"] = index
        options = (
            "-c",
            "core.hooksPath=/dev/null",
            "-c",
            "core.autocrlf=false",
            "-c",
            "core.fsmonitor=false",
        )
        try:
            done = subprocess.run(
                [program, *options, *arguments],
                cwd=self.tree, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=GIT_TIMEOUT_S,
                check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise errors.RecordRefused(
                f"git {arguments[0]} did not end within {GIT_TIMEOUT_S:.0f} s"
            ) from None
        if done.returncode != 0:
            tail = done.stderr.decode(errors="replace").strip()[-300:]
            raise errors.RecordRefused(f"git {arguments[0]} failed with code {done.returncode}: {tail}")
        return done.stdout


def unpack(archive: Path, folder: Path) -> None:
    """Extract a tar archive of any compression; links and paths that leave the folder raise `errors.RecordRefused`."""
    try:
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
    except (tarfile.TarError, OSError, EOFError, ValueError) as error:
        raise errors.RecordRefused(f"{archive.name} cannot be unpacked: {error}") from None


def pack(tree: Path, files: list[str], archive: Path) -> None:
    """Write the named files as an uncompressed tar archive whose bytes follow from names, modes and content alone.

    Uncompressed, because compressed bytes differ between versions of the compressor and the digest is in the task.
    """
    with tarfile.open(archive, "w", format=tarfile.PAX_FORMAT) as tar:
        for name in sorted(files):
            path = tree / name
            info = tarfile.TarInfo(name)
            if path.is_symlink():
                info.type, info.linkname = tarfile.SYMTYPE, str(path.readlink())
                tar.addfile(info)
                continue
            info.mode = 0o755 if path.stat().st_mode & 0o100 else 0o644
            info.size = path.stat().st_size
            with path.open("rb") as content:
                tar.addfile(info, content)


def commit_of(source: Path) -> str:
    """Return the base commit that a plain folder or an archive gives."""
    with tempfile.TemporaryDirectory() as scratch:
        tree = source
        if source.is_file():
            tree = Path(scratch, "tree")
            tree.mkdir()
            unpack(source, tree)
        return Snapshot(tree, Path(scratch, "git")).commit
