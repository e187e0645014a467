"""`rollouts status`: how many rollouts are where, what nobody works on any more, and what a person should do about it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from orchestrator.cli import render
from orchestrator.cli.console import say
from orchestrator.cli.edge import database_urls, of_each, run_async
from orchestrator.cli.options import Dbs, Json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from store.standing import Standing

_WRONG = 1
_TASKS = 20
"""Masked tasks shown at most; `--json` has all."""
_LIST = "rollouts list --state failed"
_RESUME = "rollouts resume"
_SEVERAL = 3
"""Fewer failures than these say little about what they have in common."""
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
    from store.errors import StoreError

    urls = database_urls(db)
    form = render.form_of(as_json=as_json, as_csv=False)
    wrong = False
    for url in urls:
        try:
            ((shown, found),) = run_async(of_each([url], lambda history: history.standing()))
            needs = [*needs_of(found), *_behind(url)]
        except StoreError as e:
            if len(urls) == 1:
                raise
            say(f"{e}; {e.hint}")
            wrong = True
            continue
        several = {"database": shown} if len(urls) > 1 else {}
        if form is render.Form.JSON:
            document = {**several, **_document(found, needs)}
            render.emit([document], [render.Column(name) for name in document], form)
        else:
            if several:
                say(f"database {shown}")
            _tell(found, form)
        for need in needs if check else ():
            wrong = True
            say(f"{need.what}: {need.number}; run `{need.run}`" + (f" with --db {shown}" if several else ""))
    if wrong:
        raise typer.Exit(_WRONG)


def _behind(url: str) -> list[Need]:
    """Return what is to be done about a schema that is older than this program's."""
    from store import revisions, soundness

    at = soundness.standing(url) or "0"
    missing = int(revisions.newest()) - int(at)
    need = Need(f"migrations that the database lacks (it is at {at})", missing, "rollouts db upgrade")
    return [need] if missing else []


def needs_of(found: Standing) -> list[Need]:
    """Return what a person has to see to."""
    from orchestrator.errors import FailureClass

    live, ledger = found.live, found.ledger
    waiting = Need("rollouts of runs that nobody has worked on for 10 minutes", live.forgotten, _RESUME)
    if not found.workers:
        unfinished = live.backlog + live.waiting + live.unowned
        waiting = Need("unfinished rollouts while no worker runs", unfinished, _RESUME)
    # Whoever resumes a rollout may go on in its sandbox, which a sweep would take away.
    settled_by_it = ledger.resumable if live.stale or waiting.number else 0
    needs = [
        Need("rollouts whose lease ran out, because their worker vanished", live.stale, _RESUME),
        waiting,
        Need("sandboxes without a live owner", ledger.abandoned - settled_by_it, "rollouts clean"),
        Need("sandboxes that were not released for 10 minutes", ledger.stuck, "rollouts clean"),
        Need(
            "sandboxes whose time was over 10 minutes ago, kept by a live worker",
            ledger.late,
            "rollouts doctor",
        ),
        Need("rollouts given up since workers died on them in the last hour", found.poisoned, _LIST),
    ]
    failures = {name: n for name, n in found.failures.items() if name != FailureClass.CANCELLED}
    if found.poisoned:
        failures[FailureClass.WORKER_LOST] -= found.poisoned
    for cause in (FailureClass.INTERNAL, FailureClass.TASK_INVALID):
        what = f"rollouts that failed as {cause.value} in the last hour"
        needs.append(Need(what, failures.pop(cause, 0), _LIST))
    if sum(failures.values()) >= max(_SEVERAL, found.answered):
        ended, most = sum(found.failures.values()) + found.answered, max(failures, key=failures.__getitem__)
        what = f"rollouts without a reward of {ended} in the last hour, mostly {most}"
        needs.append(Need(what, sum(failures.values()), _LIST))
    return [need for need in needs if need.number]


def _document(found: Standing, needs: Sequence[Need]) -> dict[str, object]:
    document: dict[str, object] = asdict(found)
    document["released_last_hour"] = document.pop("answered")
    document["failures_last_hour"] = document.pop("failures")
    document["masked"] = [{**asdict(task), "share": task.masked / task.graded} for task in found.masked]
    document["needs"] = [need._asdict() for need in needs]
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
