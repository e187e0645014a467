"""Reading single fields of a hostile record: whatever is not of the expected type is refused, never a traceback."""

from __future__ import annotations

import ast
import json
import math
import re
import warnings
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from orchestrator import errors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MAX_DEPTH = 40
"""Of nested lists and objects; real records need five."""
MAX_INTEGER = 2**63 - 1
MAX_TIMEOUT_S = 7 * 24 * 3600.0

SECRET_KEYS = frozenset({"override_api_key", "override_base_url", "api_key", "base_url"})
"""Keys that a trainer adds to a record for one rollout; they are no part of the task and are never stored."""

_STRINGS = re.compile(r"""[rRuU]?(?:'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*")""", re.DOTALL)
_FLAT_LIST = re.compile(r"[\[(](?:x(?:,x)*,?)?[\])]")


def plain(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record as fresh JSON values, without a trainer's per-rollout keys.

    Raises `errors.RecordRefused` for values that JSON has no form for, NUL characters, text that UTF-8 cannot hold,
    and nesting beyond `MAX_DEPTH`.
    """
    kept = {key: value for key, value in record.items() if key not in SECRET_KEYS}
    copied = _copy(kept, "", 0)
    if not isinstance(copied, dict):
        raise errors.RecordRefused(f"the record is a {json_type(copied)}, not an object")
    return copied


def _copy(value: object, where: str, depth: int) -> object:
    if depth > MAX_DEPTH:
        raise errors.RecordRefused(f"{where or 'the record'} is nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, dict):
        return {
            _text(key, f"a key of {where or 'the record'}"): _copy(
                item, f"{where}.{key}" if where else str(key), depth + 1
            )
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_copy(item, where, depth + 1) for item in value]
    return _scalar(value, where)


def _scalar(value: object, where: str) -> str | float | None:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _text(value, where)
    if isinstance(value, int):
        if abs(value) > MAX_INTEGER:
            raise errors.RecordRefused(f"{where} holds an integer beyond 64 bits")
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise errors.RecordRefused(f"{where} holds {value}, which is no JSON number")
        return float(value)
    raise errors.RecordRefused(
        f"{where} holds a {type(value).__name__}, which is no JSON value",
        hint="in YAML, put dates and the like in quotes",
    )


def _text(value: object, where: str) -> str:
    where = brief(where)
    if not isinstance(value, str):
        raise errors.RecordRefused(f"{where} is a {json_type(value)}, not text")
    if "\0" in value:
        raise errors.RecordRefused(f"{where} contains a NUL character")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise errors.RecordRefused(f"{where} contains half of a surrogate pair, which is no text") from None
    return str(value)


def brief(value: object, limit: int = 60) -> str:
    """Return a value for an error message: printable and short."""
    text = value if isinstance(value, str) else repr(value)
    text = text.encode(errors="backslashreplace").decode()
    text = "".join(c if c.isprintable() else "?" for c in text[: limit + 1])
    return text if len(text) <= limit else text[: limit - 3] + "..."


def json_type(value: object) -> str:
    """Name the JSON type of a value, for people."""
    names = {dict: "JSON object", list: "list", str: "text", bool: "boolean", int: "number", float: "number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def is_empty(value: object) -> bool:
    """Say whether a field counts as not given."""
    return value is None or value in ([], {}) or (isinstance(value, str) and not value.strip())


class Row:
    """A record that is read field by field; what nobody reads is left for `extra`."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self._data = dict(data)

    def __contains__(self, key: str) -> bool:
        """Say whether the key is there with a value."""
        return not is_empty(self._data.get(key))

    def peek(self, key: str) -> object:
        """Return a value without taking it."""
        return self._data.get(key)

    def take(self, *keys: str) -> tuple[str, Any]:
        """Remove and return the first non-empty value with its key; a later non-empty one stays for `extra`."""
        found: tuple[str, Any] = (keys[0], None)
        for key in keys:
            if key not in self:
                self._data.pop(key, None)
            elif is_empty(found[1]):
                found = (key, self._data.pop(key))
        return found

    def text(self, *keys: str) -> str:
        """Take a text; empty when there is none."""
        key, value = self.take(*keys)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise errors.RecordRefused(f"{key} is a {json_type(value)}, not text")
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        """Take a boolean."""
        _, value = self.take(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise errors.RecordRefused(f"{key} is {brief(value)}, not true or false")
        return value

    def seconds(self, key: str, *, default: float) -> float:
        """Take a positive number of seconds, at most a week."""
        _, value = self.take(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_TIMEOUT_S:
            raise errors.RecordRefused(
                f"{key} is {brief(value)}, not a number of seconds between 0 and {MAX_TIMEOUT_S:.0f}"
            )
        return float(value)

    def ids(self, *keys: str) -> tuple[str, ...]:
        """Take a list of texts: a list, JSON text or a Python literal; empty when there is none."""
        key, value = self.take(*keys)
        return parse_ids(key, value)

    def rest(self) -> dict[str, Any]:
        """Return what nobody took."""
        return dict(self._data)


def parse_ids(key: str, value: object) -> tuple[str, ...]:
    """Return the texts of a list field in any of its spellings (a list, JSON text, Python literal, "" or null).

    Text is never evaluated: anything but a flat list of string literals is refused with `errors.RecordRefused`.
    """
    if is_empty(value):
        return ()
    if isinstance(value, str):
        value = _parse_list_text(key, value)
    if not isinstance(value, list | tuple):
        raise errors.RecordRefused(f"{key} is a {json_type(value)}, not a list of texts")
    found = [_text(item, f"an item of {key}") for item in value]
    if not all(item.strip() for item in found):
        raise errors.RecordRefused(f"{key} holds an empty text")
    return tuple(found)


def _parse_list_text(key: str, text: str) -> object:
    try:
        return load_json(text)
    except errors.RecordRefused:
        pass  # the other spelling, a Python literal, is tried next
    # Literals between single commas and nothing else: the parser meets no nesting, and a forgotten comma does not make
    # one test id of two.
    if _FLAT_LIST.fullmatch("".join(_STRINGS.sub("x", text).split())):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore"
                )  # a literal such as '\d' is valid, Python only advises against it
                value: object = ast.literal_eval(text.strip())
                return value
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            pass  # refused below with what it looks like
    raise errors.RecordRefused(f"{key} is neither a JSON list nor a Python list of texts: {brief(text)}")


def load_json(text: str) -> object:
    """Parse JSON; raises `errors.RecordRefused` with what is wrong. NaN passes: `plain` and the field readers refuse it."""
    try:
        value: object = json.loads(text)
        return value
    except RecursionError:
        raise errors.RecordRefused("the JSON text is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise errors.RecordRefused(f"not valid JSON: {error.msg} at character {error.pos + 1}") from None
    except ValueError as error:  # an integer with more digits than Python converts
        raise errors.RecordRefused(f"not valid JSON: {brief(str(error))}") from None


def relative_paths(key: str, paths: tuple[str, ...]) -> tuple[str, ...]:
    """Return paths that stay below the work tree, in normal form; others raise `errors.RecordRefused`."""
    return tuple(relative_path(key, path) for path in paths)


def relative_path(key: str, path: str) -> str:
    """Return one path below the work tree in normal form; another raises `errors.RecordRefused`."""
    parsed = PurePosixPath(path)
    if parsed.is_absolute() or ".." in parsed.parts or not path.strip() or any(_controls(path)):
        raise errors.RecordRefused(f"{key} names {brief(path)}, which is no path below the work tree")
    return str(parsed)


def absolute_path(key: str, path: str) -> str:
    """Return an absolute path in normal form; `/` itself, `..` or a relative one raises `errors.RecordRefused`."""
    parsed = PurePosixPath(path)
    if not parsed.is_absolute() or ".." in parsed.parts or len(parsed.parts) < 2 or any(_controls(path)):
        raise errors.RecordRefused(
            f"{key} is {brief(path)}, which is no absolute path of a folder",
            hint=f"write {key} like /testbed, without '..'",
        )
    return "/" + "/".join(parsed.parts[1:])


def _controls(text: str) -> Iterator[str]:
    return (c for c in text if ord(c) < 32 or ord(c) == 127)
