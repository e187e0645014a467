"""Files of the repository as the editing tools see them: inside `workdir`, text, with their mode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator.agents.swe.tools.base import ToolError

if TYPE_CHECKING:
    from orchestrator.sandbox.base import Sandbox

FILE_LIMIT = 16 * 1024 * 1024
"""Bytes of the largest file that the tools open."""

_LOOK_TIMEOUT_S = 60.0

# $1 is the work tree, $2 the path. `realpath -m` follows links and accepts what does not exist yet; `-z` keeps
# names with line breaks whole.
_LOOK = """
realpath -mz -- "$1" "$2" || exit 3
if [ -d "$2" ]; then printf 'directory\\0'
elif [ -f "$2" ]; then printf 'file\\0'; stat -Lc %a -- "$2"
elif [ -e "$2" ]; then printf 'special\\0'
else printf 'missing\\0'
fi
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a path leads once every link is followed."""

    path: str
    kind: str
    """file | directory | special | missing"""
    mode: int
    """Permission bits; those of a new file when nothing is there yet."""


async def locate(sandbox: Sandbox, path: str) -> Place:
    """Return where `path` (absolute, or below the work tree) leads; raises `ToolError` when that is outside of it."""
    if not path or "\0" in path:
        raise ToolError("The path is empty or holds a NUL character.")
    full = path if path.startswith("/") else f"{sandbox.workdir.rstrip('/')}/{path}"
    look = await sandbox.run(
        ["sh", "-c", _LOOK, "sh", sandbox.workdir, full], timeout_s=_LOOK_TIMEOUT_S, cwd="/"
    )
    parts = look.output.decode("utf-8", errors="surrogateescape").split("\0")
    if look.exit_code != 0 or len(parts) != 4:
        shown = look.output.decode("utf-8", errors="replace").strip()[:300]
        raise ToolError(f"{path} could not be looked up: {shown or 'no answer'}")
    root, real, kind, mode = parts
    if not real.startswith(root.rstrip("/") + "/"):
        where = "" if real == full else f" (it leads to {printable(real)})"
        raise ToolError(f"{path} is outside {sandbox.workdir}{where}. Only files inside it can be edited.")
    return Place(path=real, kind=kind, mode=int(mode, 8) & 0o7777 if kind == "file" else 0o644)


async def read_text(sandbox: Sandbox, path: str) -> tuple[Place, str]:
    """Return an existing text file; bytes that are not UTF-8 survive as surrogates (see `to_bytes`)."""
    place = await locate(sandbox, path)
    if place.kind == "missing":
        raise ToolError(f"{path} does not exist.")
    if place.kind != "file":
        raise ToolError(
            f"{path} is a {place.kind}{'' if place.kind == 'directory' else ' file'}, not a text file."
        )
    try:
        data = await sandbox.read(place.path, limit=FILE_LIMIT)
    except ValueError:
        raise ToolError(f"{path} is larger than {FILE_LIMIT} bytes; use bash for it.") from None
    except OSError as error:
        raise ToolError(f"{path} cannot be read: {error.strerror or type(error).__name__}.") from None
    if b"\0" in data:
        raise ToolError(f"{path} is a binary file.")
    return place, data.decode("utf-8", errors="surrogateescape")


async def write_text(sandbox: Sandbox, place: Place, text: str) -> None:
    """Replace the file's content and keep its mode."""
    try:
        await sandbox.write(place.path, to_bytes(text), mode=place.mode)
    except OSError as error:
        raise ToolError(
            f"{printable(place.path)} cannot be written: {error.strerror or type(error).__name__}."
        ) from None


def to_bytes(text: str) -> bytes:
    """Turn text of `read_text` back into the very bytes it came from."""
    return text.encode("utf-8", errors="surrogateescape")


def printable(text: str) -> str:
    """Return text that can go over the wire: undecodable bytes become U+FFFD."""
    return text.encode("utf-8", errors="surrogateescape").decode("utf-8", errors="replace")
