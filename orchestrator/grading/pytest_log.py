"""Read test results out of printed pytest output: weak evidence, for records whose command is not ours.

The flavours are those that `tasks.log_parsers` names.
"""

from __future__ import annotations

import re

from orchestrator.grading.junit import worst
from orchestrator.tasks.log_parsers import PYTEST_OPTIONS, PYTEST_V2

_STATUSES = ("PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL", "XPASS")
_LEADING = re.compile(rf"^({'|'.join(_STATUSES)})\s+(\S.*)$")
_SUBTEST = re.compile(r"^SUBFAILED(?:\[.*?\]|\(.*?\)|<.*?>)*\s+(\S.*)$")
_TRAILING = re.compile(rf"^(\S+::.*?)\s+({'|'.join(_STATUSES)})(?:\s+\[\s*\d+%\])?$")
_SUMMARY = re.compile(r"^=+ short test summary info =+$")
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_OPTION = re.compile(r"^(.*?)\[(.*)\]$", re.DOTALL)


def parse_pytest_log(text: str, flavour: str = "pytest") -> dict[str, str]:
    """Return test id -> status from pytest's `-rA` lines.

    Only what follows the last summary header counts when there is one, because tests may print such lines
    themselves; of several lines for one id the worst counts there, and the last one in a log without a header.
    """
    lines = [_COLOUR.sub("", line).rstrip("\r") for line in text.split("\n")]
    headers = [number for number, line in enumerate(lines) if _SUMMARY.match(line)]
    found: dict[str, str] = {}
    for line in lines[headers[-1] + 1 :] if headers else lines:
        if (entry := _read_line(line, flavour)) is None:
            continue
        node_id, status = entry
        found[node_id] = worst((status, found.get(node_id, status))) if headers else status
    return found


def _read_line(line: str, flavour: str) -> tuple[str, str] | None:
    if match := _LEADING.match(line):
        status, rest = match.groups()
    elif match := _SUBTEST.match(line):
        status, rest = "FAILED", match[1]  # pytest prints its test as passed besides
    elif flavour == PYTEST_V2 and (match := _TRAILING.match(line)):
        rest, status = match.groups()
    else:
        return None
    if status != "PASSED":
        rest = _cut_message(rest)
    node_id = rest.strip()
    if "::" not in node_id and not node_id.endswith(".py"):
        return None  # `SKIPPED [1] file:12: reason` names no test
    if flavour == PYTEST_OPTIONS:
        node_id = _shorten_option(node_id)
    return node_id, status


def _cut_message(rest: str) -> str:
    """Drop ` - message`; a parameter may hold the same separator, so brackets are kept whole first."""
    head, bracket, tail = rest.partition("[")
    if bracket and " - " not in head and "]" in tail:
        inside, close, after = tail.partition("]")
        return head + bracket + inside + close + after.split(" - ", 1)[0]
    return rest.split(" - ", 1)[0]


def _shorten_option(node_id: str) -> str:
    """Keep only the last part of a path in brackets, which differs between machines."""
    match = _OPTION.match(node_id)
    if match is None:
        return node_id
    name, option = match.groups()
    if option.startswith("/") and not option.startswith("//") and "*" not in option:
        option = "/" + option.rsplit("/", 1)[-1]
    return f"{name}[{option}]"
