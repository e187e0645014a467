"""`rollouts list` and `rollouts show`: what the store knows of rollouts."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator import errors
from orchestrator.cli import render
from orchestrator.cli.console import say
from orchestrator.cli.edge import of_each, of_the_one_with, run_async
from orchestrator.cli.options import Csv, Dbs, Json

if TYPE_CHECKING:
    from store.history import History, Record

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}

_LINE = (
    *(
        render.Column(n)
        for n in ("id", "run_id", "instance_id", "sample", "state", "reward", "grade_outcome")
    ),
    *(render.Column(n) for n in ("failure_class", "attempts")),
    render.Column("created_at", is_time=True),
    render.Column("finished_at", is_time=True),
    render.Column("failure_msg"),
)
_TABLE = tuple(render.Column(n) for n in ("id", "instance_id", "sample", "state", "reward", "outcome"))
_SHORT = 60
"""Characters of a failure's message in a table; `show` has all of it."""
_ALL = tuple(
    render.Column(n)
    for n in (
        "id", "run_id", "instance_id", "sample", "retry_no", "agent_type", "state", "attempts", "reward",
        "grade_outcome", "mask_sample", "failure_class", "failure_msg", "created_at", "finished_at",
    )
)  # fmt: skip


def list_rollouts(
    run: Annotated[str | None, typer.Option("--run", metavar="NAME", help="Only of this run.")] = None,
    state: Annotated[str | None, typer.Option("--state", help="Only in this state.")] = None,
    instance: Annotated[str | None, typer.Option("--instance", metavar="ID", help="Only of this task.")] = None,
    since: Annotated[
        str | None,
        typer.Option("--since", metavar="WHEN", help="Submitted since: 90m, 2h, 7d, or an ISO date or time (UTC)."),
    ] = None,
    limit: Annotated[int, typer.Option("-n", "--limit", min=0, max=1_000_000, help="Newest so many; 0 for all.")] = 100,
    db: Dbs = None,
    as_json: Json = False,
    as_csv: Csv = False,
) -> None:  # fmt: skip
    """List rollouts, newest first."""
    _check_state(state)
    since_ms = None if since is None else _since_ms(since, time.time())

    async def read(history: History) -> list[Record]:
        return await history.overview(
            run_id=run,
            state=state,
            instance_id=instance,
            since_ms=since_ms,
            limit=limit + 1 if limit else None,
        )

    answers = run_async(of_each(db, read))
    found = [row for _, rows in answers for row in rows]
    if len(answers) > 1:
        found.sort(key=lambda row: (row["created_at"], row["id"]), reverse=True)
    shown = found[:limit] if limit else found
    form = render.form_of(as_json=as_json, as_csv=as_csv)
    match form:
        case render.Form.TABLE:
            _tables(shown)
        case render.Form.LINES:
            render.emit(shown, _LINE, form)
        case render.Form.JSON | render.Form.CSV:
            render.emit(shown, _ALL, form)
    if len(shown) < len(found):
        say(f"only the newest {limit} are shown; -n 0 shows all")


def _tables(rows: list[Record]) -> None:
    """Show one table for each run: its name in every line would leave no room for the rest."""
    from orchestrator.cli.causes import shortened
    from orchestrator.cli.summary import outcome_of

    for run_id in dict.fromkeys(row["run_id"] for row in rows):
        of_run = [
            {**row, "outcome": outcome_of(row), "message": shortened(row["failure_msg"] or "", _SHORT)}
            for row in rows
            if row["run_id"] == run_id
        ]
        failed = any(row["failure_msg"] for row in of_run)
        say(f"run {run_id}, since {render.iso(min(row['created_at'] for row in of_run))}")
        render.emit(of_run, (*_TABLE, *((render.Column("message"),) if failed else ())), render.Form.TABLE)


def show(
    rollout_id: Annotated[str, typer.Argument(metavar="ID", help="A rollout id, or how a single one begins.")],
    patch: Annotated[bool, typer.Option("--patch", help="Only the patch, byte for byte.")] = False,
    log: Annotated[bool, typer.Option("--log", help="Only the output of the tests of the effective grade.")] = False,
    transcript: Annotated[
        bool, typer.Option("--transcript", help="Only the conversation of the last attempt that has one, a message a line.")
    ] = False,
    db: Dbs = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Show everything that happened to one rollout."""
    from orchestrator.cli import story

    chosen = [name for name, on in (("patch", patch), ("log", log), ("transcript", transcript)) if on]
    if len(chosen) > 1:
        raise errors.UsageError(f"--{chosen[0]} and --{chosen[1]} exclude each other")

    if chosen:
        render.write_raw(
            run_async(
                of_the_one_with(db, rollout_id, lambda history, found: story.part(history, found, chosen[0]))
            )
        )
        return
    story.tell(
        run_async(of_the_one_with(db, rollout_id, story.read)), render.form_of(as_json=as_json, as_csv=False)
    )


def _check_state(state: str | None) -> None:
    from orchestrator.states import State

    known = [s.value for s in State]
    if state is not None and state not in known:
        raise errors.UsageError(f"there is no state {state!r}", hint=f"states: {', '.join(known)}")


def _since_ms(text: str, now_s: float) -> int:
    if match := re.fullmatch(r"(\d{1,9})([smhdw])", text):
        return round((now_s - int(match[1]) * _UNITS_S[match[2]]) * 1000)
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise errors.UsageError(
            f"--since {text!r} is no time", hint="write 90m, 2h, 7d, 2026-01-31 or 2026-01-31T18:00"
        ) from None
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    return round(when.timestamp() * 1000)
