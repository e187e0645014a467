"""`rollouts status`: how many rollouts are where, what nobody works on any more, and what a person should do about it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from orchestrator.cli import render
from orchestrator.cli.console import say
from orchestrator.cli.edge import of_each, run_async
from orchestrator.cli.options import Dbs, Json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from store.standing import Standing

_WRONG = 1
_TASKS = 20
"""Masked tasks shown at most; `--json` has all."""
_UNITS = ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min"), (1_000, "s"))


class Need(NamedTuple):
    """Something that does not come right by itself, and the command to run next."""

    what: str
    number: int
    run: str


def status(
    db: Dbs = None,
    check: Annotated[
        bool, typer.Option("--check", help="Say what needs a person, and exit with 1 when anything does.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show where all rollouts and sandboxes stand."""
    answers = run_async(of_each(db, lambda history: history.standing()))
    form = render.form_of(as_json=as_json, as_csv=False)
    wrong = False
    for shown, found in answers:
        several = {"database": shown} if len(answers) > 1 else {}
        if form is render.Form.JSON:
            document = {**several, **_document(found)}
            render.emit([document], [render.Column(name) for name in document], form)
        else:
            if several:
                say(f"database {shown}")
            _tell(found, form)
        for need in needs_of(found) if check else ():
            wrong = True
            say(f"{need.what}: {need.number}; run `{need.run}`" + (f" with --db {shown}" if several else ""))
    if wrong:
        raise typer.Exit(_WRONG)


def needs_of(found: Standing) -> list[Need]:
    """Return what a person has to see to."""
    from orchestrator.errors import FailureClass

    live = found.live
    needs = [
        Need("rollouts whose lease ran out, because their worker vanished", live.stale, "rollouts resume"),
        Need("sandboxes without a live owner", found.ledger.abandoned, "rollouts clean"),
        Need("sandboxes that could not be released for 10 minutes", found.ledger.stuck, "rollouts clean"),
    ]
    if not found.workers:
        unfinished = live.backlog + live.waiting + live.unowned
        needs.insert(1, Need("unfinished rollouts while no worker runs", unfinished, "rollouts resume"))
    else:
        needs.insert(
            1, Need("rollouts that nobody took up for 10 minutes", live.forgotten, "rollouts resume")
        )
    for cause in (FailureClass.INTERNAL, FailureClass.TASK_INVALID):
        what = f"rollouts that failed as {cause.value} in the last hour"
        needs.append(Need(what, found.failures.get(cause, 0), "rollouts list --state failed"))
    return [need for need in needs if need.number]


def _document(found: Standing) -> dict[str, object]:
    document: dict[str, object] = asdict(found)
    document["failures_last_hour"] = document.pop("failures")
    document["masked"] = [{**asdict(task), "share": task.masked / task.graded} for task in found.masked]
    document["needs"] = [need._asdict() for need in needs_of(found)]
    return document


def _tell(found: Standing, form: render.Form) -> None:
    """Write small tables; in a pipe lines that begin with their section."""
    _numbers("rollouts", found.states, form)
    _numbers("live", {**asdict(found.live), "workers": found.workers}, form)
    _numbers("sandboxes", {**found.ledger.open, "without_owner": found.ledger.without_owner}, form)
    if found.oldest is not None:
        oldest: dict[str, object] = asdict(found.oldest)
        oldest["age"] = duration(found.oldest.age_ms)
        del oldest["age_ms"]
        _rows("oldest", [oldest], form)
    failures = [{"failure_class": name, "rollouts": number} for name, number in found.failures.items()]
    _rows("failures_last_hour", failures, form)
    shown = found.masked[:_TASKS] if form is render.Form.TABLE else found.masked
    _rows("masked", [{**asdict(task), "share": f"{task.masked / task.graded:.2f}"} for task in shown], form)
    if len(shown) < len(found.masked):
        say(f"and {len(found.masked) - len(shown)} more with masked grades; --json has all")


def _numbers(section: str, numbers: Mapping[str, int], form: render.Form) -> None:
    """Write counts: side by side for people, a line each in a pipe."""
    if form is render.Form.TABLE:
        _rows(section, [numbers], form)
    else:
        _rows(section, [{"name": name, "number": number} for name, number in numbers.items()], form)


def _rows(section: str, rows: Sequence[Mapping[str, object]], form: render.Form) -> None:
    if not rows:
        return
    names = [*rows[0]] if form is render.Form.TABLE else ["section", *rows[0]]
    columns = [render.Column(name) for name in names]
    render.emit([{"section": section, **row} for row in rows], columns, form, title=section)


def duration(ms: int) -> str:
    """Return a time span for people, in its two largest units."""
    parts: list[str] = []
    for size, unit in _UNITS:
        number, ms = divmod(ms, size)
        if number or parts:
            parts.append(f"{number} {unit}")
    return " ".join(parts[:2]) or "0 s"
