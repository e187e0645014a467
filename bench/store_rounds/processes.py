"""The bench's side of a contender: a process that runs one round per request, under strace where syncs are counted."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_SYNC = re.compile(r"\bf(?:data)?sync\(")
START_S = 90.0
ANSWER_S = 180.0
END_S = 60.0
TRIES = 3


class ContenderFailed(RuntimeError):
    """A contender ended or answered nonsense; its last words are in the message."""


@dataclass(frozen=True, slots=True)
class Round:
    """What one round of one contender came to."""

    count: int
    seconds: float
    syncs: int | None
    """fdatasync and fsync calls of the round; None when nobody counted."""
    answer: dict[str, Any]

    @property
    def rate(self) -> float:
        """Acknowledged writes per second."""
        return self.count / self.seconds


def under_strace(log: Path, delay_us: int) -> list[str]:
    """Return the command that logs every sync and makes each take `delay_us` longer (0: as long as it takes)."""
    command = ["strace", "-f", "-qq", "--seccomp-bpf", "-e", "trace=fdatasync,fsync", "-e", "signal=none"]
    if delay_us:
        command += ["-e", f"inject=fdatasync,fsync:delay_exit={delay_us}"]
    return [*command, "-o", str(log)]


class Contender:
    """A running contender. Use as a context; `round` blocks until the answer is there."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        words: Path,
        log: Path | None = None,
        delay_us: int = 0,
        cwd: Path | None = None,
    ) -> None:
        self._command = [*(under_strace(log, delay_us) if log is not None else []), *command]
        self._log = log
        self._words = words
        self._cwd = cwd
        self._name = " ".join(command)
        self._process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        with self._words.open("wb") as errors:
            return subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, cwd=self._cwd,
                text=True, start_new_session=True,
            )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        _open(self._process.stdin).close()
        try:
            self._process.wait(timeout=END_S)
        except subprocess.TimeoutExpired:
            self._kill()
        _open(self._process.stdout).close()

    def _kill(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def ready(self) -> None:
        """Wait until the contender has prepared its database; one that hangs, as strace at times does, starts again."""
        for _ in range(TRIES):
            if select.select([_open(self._process.stdout)], [], [], START_S)[0]:
                self.answer()
                return
            print(f"{self._name}: did not start in {START_S:g} s; starting it again", file=sys.stderr)
            self._kill()
            self._process = self._start()
        raise ContenderFailed(f"{self._name}: did not start")

    def round(self, seconds: float, tasks: int) -> Round:
        """Run one round with `tasks` concurrent callers."""
        before = self._syncs()
        self.ask(seconds, tasks)
        answer = self.answer()
        if answer.get("refused"):
            raise ContenderFailed(f"{self._name}: {answer['refused']} of its own transitions were refused")
        syncs = None if before is None else (self._syncs() or 0) - before
        return Round(answer["count"], answer["seconds"], syncs, answer)

    def _syncs(self) -> int | None:
        return None if self._log is None else len(_SYNC.findall(self._log.read_text(errors="replace")))

    def ask(self, seconds: float, tasks: int) -> None:
        """Let a round begin without waiting for its end."""
        asking = _open(self._process.stdin)
        asking.write(json.dumps({"seconds": seconds, "tasks": tasks}) + "\n")
        asking.flush()

    def answer(self) -> dict[str, Any]:
        """Wait for what the contender says next."""
        said = _open(self._process.stdout)
        line = said.readline() if select.select([said], [], [], ANSWER_S)[0] else "nothing"
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:
            last = self._words.read_text(errors="replace")[-2000:]
            raise ContenderFailed(f"{self._name}: answered {line!r}\n{last}") from None
        return answer


def _open(pipe: IO[str] | None) -> IO[str]:
    if pipe is None:
        raise TypeError("this pipe was asked for when the process was started")
    return pipe
