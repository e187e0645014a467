"""Reading and reversing git patches as bytes, without applying them."""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass, field

from orchestrator import errors

_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_SWAPPED = {
    b"new file mode ": b"deleted file mode ",
    b"deleted file mode ": b"new file mode ",
    b"old mode ": b"new mode ",
    b"new mode ": b"old mode ",
}
_NAMING = (b"--- ", b"+++ ", b"rename from ", b"rename to ", b"copy from ", b"copy to ")


@dataclass(slots=True)
class _Hunk:
    line: bytes
    header: re.Match[bytes]
    body: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class _Part:
    """The headers that stand together, then their hunks."""

    headers: list[bytes] = field(default_factory=list)
    hunks: list[_Hunk] = field(default_factory=list)


def _parse(data: bytes) -> list[_Part]:
    """Split a patch by its hunk counts: text that looks like a header is none while a hunk's lines are owed."""
    parts = [_Part()]
    old = new = 0
    for line in _split(data):
        hunks = parts[-1].hunks
        if hunks and (old > 0 or new > 0 or line.startswith(b"\\")):
            hunks[-1].body.append(line)
            old -= line[:1] not in {b"+", b"\\"}
            new -= line[:1] not in {b"-", b"\\"}
        elif match := _HUNK.match(line):
            hunks.append(_Hunk(line, match))
            old, new = (int(match[n]) if match[n] is not None else 1 for n in (2, 4))
        else:
            if hunks:
                parts.append(_Part())
            parts[-1].headers.append(line)
    return parts


def _split(data: bytes) -> list[bytes]:
    """Split at line feeds only: a carriage return belongs to the line that holds it."""
    lines = [line + b"\n" for line in data.split(b"\n")]
    lines[-1] = lines[-1][:-1]
    return [line for line in lines if line]


def patch_paths(data: bytes) -> list[bytes]:
    """Return every path that a patch's headers name, without `a/` and `b/`, in the order of appearance."""
    found: dict[bytes, None] = {}
    for part in _parse(data):
        for line in part.headers:
            path = _named(line.rstrip(b"\r\n"))
            if path is not None and path != b"/dev/null":
                found[path] = None
    return list(found)


def _named(line: bytes) -> bytes | None:
    if line.startswith(b"diff --git "):
        # Changes without lines of text (modes, empty files) have no ---/+++ pair. Both names are equal then.
        names = line[len(b"diff --git ") :]
        middle = len(names) // 2
        left, right = _unquote(names[:middle]), _unquote(names[middle + 1 :])
        is_pair = names[middle : middle + 1] == b" " and left[:2] == b"a/" and right[:2] == b"b/"
        return left[2:] if is_pair and left[2:] == right[2:] else None
    for prefix in _NAMING:
        if line.startswith(prefix):
            path = _unquote(line[len(prefix) :].split(b"\t")[0])
            return path[2:] if prefix[:1] in b"-+" and path[:2] in {b"a/", b"b/"} else path
    return None


def _unquote(name: bytes) -> bytes:
    """Undo git's C-style quoting of names with special characters."""
    if len(name) < 2 or not (name.startswith(b'"') and name.endswith(b'"')):
        return name
    try:
        return codecs.escape_decode(name[1:-1])[0]
    except ValueError:
        return name


def check_patch(name: str, data: bytes) -> None:
    """Refuse a patch that git cannot apply by its form, or that names paths outside the repository.

    Raises `errors.RecordRefused`.
    """
    paths = patch_paths(data)
    if not paths:
        raise errors.RecordRefused(
            f"{name} is no git patch: it names no file", hint="make it with `git diff --binary --full-index`"
        )
    for path in paths:
        parts = path.split(b"/")
        if path.startswith(b"/") or b".." in parts or b".git" in parts:
            raise errors.RecordRefused(
                f"{name} touches {path[:80]!r}, which lies outside the repository's files"
            )
    for part in _parse(data):
        if any(re.fullmatch(rb"Binary files .* differ\r?\n?", line) for line in part.headers):
            raise errors.RecordRefused(
                f"{name} says only that binary files differ, without their content",
                hint="make it with `git diff --binary --full-index`",
            )


def reverse_patch(data: bytes) -> bytes | None:
    """Return the patch that undoes this one; None for renames, copies and binary content."""
    if data and not data.endswith(b"\n"):
        data += b"\n"
    out: list[bytes] = []
    for part in _parse(data):
        headers = _reverse_headers(part.headers)
        if headers is None:
            return None
        out += headers
        for hunk in part.hunks:
            out += _reverse_hunk(hunk)
    return b"".join(out)


def _reverse_headers(headers: list[bytes]) -> list[bytes] | None:
    out: list[bytes] = []
    old_name: bytes | None = None
    for line in headers:
        if line.startswith((b"rename ", b"copy ", b"similarity ", b"GIT binary patch", b"Binary files ")):
            return None
        swapped = next((p for p in _SWAPPED if line.startswith(p)), None)
        if swapped is not None:
            out.append(_SWAPPED[swapped] + line[len(swapped) :])
            if swapped == b"new mode ":
                out[-2:] = out[:-3:-1]  # git prints the old mode first
        elif index := re.fullmatch(rb"index ([0-9a-f]+)\.\.([0-9a-f]+)( \d+)?(\r?\n)", line):
            out.append(b"index %s..%s%s%s" % (index[2], index[1], index[3] or b"", index[4]))
        elif line.startswith(b"--- "):
            old_name = line[4:]
        elif line.startswith(b"+++ ") and old_name is not None:
            out.append(b"--- " + _renamed(line[4:], b"b/", b"a/"))
            out.append(b"+++ " + _renamed(old_name, b"a/", b"b/"))
        else:
            out.append(line)
    return out


def _renamed(name: bytes, old: bytes, new: bytes) -> bytes:
    quote = b'"' if name.startswith(b'"') else b""
    return quote + new + name[len(quote + old) :] if name.startswith(quote + old) else name


def _reverse_hunk(hunk: _Hunk) -> list[bytes]:
    match = hunk.header
    old = match[1] if match[2] is None else match[1] + b"," + match[2]
    new = match[3] if match[4] is None else match[3] + b"," + match[4]
    out = [b"@@ -%s +%s @@%s" % (new, old, hunk.line[match.end() :])]
    removed: list[bytes] = []
    added: list[bytes] = []
    last = out
    for line in hunk.body:
        if line.startswith(b"-"):
            last = added
            added.append(b"+" + line[1:])
        elif line.startswith(b"+"):
            last = removed
            removed.append(b"-" + line[1:])
        elif line.startswith(b"\\"):
            last.append(line)
        else:
            out += removed + added
            removed, added, last = [], [], out
            out.append(line)
    return out + removed + added
