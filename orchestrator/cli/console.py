"""Words for people, on standard error. Stored and foreign text is hostile: it never reaches a terminal as it is."""

from __future__ import annotations

import logging
import sys
import unicodedata

_HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Unicode categories that move the cursor, reorder text or break lines."""


def clean(text: str) -> str:
    """Return text that a terminal shows as it is: one line, without control and reordering characters."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_visible(character) for character in text)


def _visible(character: str) -> str:
    if character in "\n\r\t":
        return " "
    return "\N{REPLACEMENT CHARACTER}" if unicodedata.category(character) in _HIDDEN else character


def say(text: str) -> None:
    """Tell the person something that is not data."""
    sys.stderr.write(f"{clean(text)}\n")
    sys.stderr.flush()


def complain(message: str, hint: str = "") -> None:
    """Report an error and the next step."""
    say(f"error: {message}")
    if hint:
        say(f"hint: {hint}")


class _Said(logging.Handler):
    """Shows log records the way everything else is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        say(f"{record.levelname.lower()}: {record.getMessage()}")


def show_warnings(*, debug: bool) -> None:
    """Show what the program logs, from warnings on; with `debug`, everything of its own."""
    logging.basicConfig(handlers=[_Said()], level=logging.WARNING, force=True)
    if debug:
        for name in ("orchestrator", "store"):
            logging.getLogger(name).setLevel(logging.DEBUG)
