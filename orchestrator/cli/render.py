"""How rows are shown: a table on a terminal, tab-separated lines in a pipe, JSON lines or CSV when asked for."""

from __future__ import annotations

import csv
import json
import math
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import TYPE_CHECKING, Any

from orchestrator.cli.console import clean

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Form(Enum):
    """What comes out on standard output."""

    TABLE = "table"
    LINES = "lines"
    JSON = "json"
    CSV = "csv"


@dataclass(frozen=True, slots=True)
class Column:
    """One column; `is_time` marks epoch milliseconds, shown to people as UTC in ISO 8601."""

    name: str
    is_time: bool = False

    def text(self, value: object) -> str:
        """Return the value as people read it."""
        if self.is_time and isinstance(value, int):
            return iso(value)
        return plain(value)


def form_of(*, as_json: bool, as_csv: bool) -> Form:
    """Choose the form: what was asked for, else by whether a person looks."""
    if as_json:
        return Form.JSON
    if as_csv:
        return Form.CSV
    return Form.TABLE if sys.stdout.isatty() else Form.LINES


def iso(epoch_ms: int) -> str:
    """Return a time as UTC in ISO 8601, to the millisecond."""
    return (
        datetime.fromtimestamp(epoch_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%S.") + f"{epoch_ms % 1000:03}Z"
    )


def plain(value: object) -> str:
    """Return a value as text on one line, without anything a terminal would act on."""
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case str():
            return clean(value)
        case bytes():
            return value.hex()
        case dict() | list():
            return clean(json.dumps(value, sort_keys=True, ensure_ascii=False))
        case _:
            return clean(str(value))


def emit(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[Column], form: Form, *, title: str = ""
) -> None:
    """Write rows to standard output; a table has a title above it when one is given, and is left out when empty."""
    match form:
        case Form.TABLE:
            if rows or not title:
                _table(rows, columns, title)
        case Form.LINES:
            for row in rows:
                _write("\t".join(column.text(row[column.name]) for column in columns))
        case Form.JSON:
            for row in rows:
                _write(json_line({column.name: row[column.name] for column in columns}))
        case Form.CSV:
            _csv(rows, columns)


def json_line(value: object) -> str:
    """Return a value as one line of JSON in ASCII, so that it is harmless on a terminal too.

    Numbers that JSON has no words for (infinite, or none at all) become null.
    """
    return json.dumps(
        _finite(value),
        default=lambda other: other.hex() if isinstance(other, bytes) else str(other),
        allow_nan=False,
    )


def _finite(value: object) -> object:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {key: _finite(item) for key, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
        case _:
            return value


def _csv(rows: Sequence[Mapping[str, Any]], columns: Sequence[Column]) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow([column.name for column in columns])
    for row in rows:
        writer.writerow([plain(row[column.name]) for column in columns])


def _table(rows: Sequence[Mapping[str, Any]], columns: Sequence[Column], title: str) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        title=Text(title, style="bold") if title else None,
        title_justify="left",
    )
    for column in columns:
        table.add_column(Text(column.name), overflow="fold")
    for row in rows:
        table.add_row(*(Text(column.text(row[column.name])) for column in columns))
    Console(markup=False, highlight=False, emoji=False).print(table)


def write_raw(data: bytes) -> None:
    """Write stored bytes: exactly as they are into a pipe or file, made harmless on a terminal."""
    if not sys.stdout.isatty():
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return
    for line in data.decode("utf-8", "replace").split("\n"):
        _write(clean(line.replace("\t", "    ")))


def _write(line: str) -> None:
    sys.stdout.write(f"{line}\n")
