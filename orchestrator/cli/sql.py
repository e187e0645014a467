"""`rollouts sql`: other people's questions to the history, read-only in the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator import errors
from orchestrator.cli import render
from orchestrator.cli.console import say
from orchestrator.cli.edge import of_each, run_async
from orchestrator.cli.options import Csv, Dbs, Json

if TYPE_CHECKING:
    from store.questions import QueryResult

_SHORTEST_S, _LONGEST_S = 0.1, 3600.0
_SCHEMA = "SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL AND type <> 'trigger' ORDER BY type DESC, name"


def sql(
    query: Annotated[
        str | None, typer.Argument(metavar="QUERY", help="One SELECT.", show_default=False)
    ] = None,
    db: Dbs = None,
    as_json: Json = False,
    as_csv: Csv = False,
    limit: Annotated[int, typer.Option("--limit", min=1, max=1_000_000, help="Rows at most.")] = 1000,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds at most, 0.1 to 3600.")] = 30.0,
    schema: Annotated[bool, typer.Option("--schema", help="Show tables, views and indexes instead.")] = False,
) -> None:
    """Ask the database; it cannot be changed this way."""
    if (query is None) is not schema:
        raise errors.UsageError(
            "give either a query or --schema",
            hint='for example: rollouts sql "select state, count(*) from rollouts group by 1"',
        )
    if query is not None and not query.strip():
        raise errors.UsageError("the query is empty", hint="give one SELECT")
    if not _SHORTEST_S <= timeout_s <= _LONGEST_S:
        raise errors.UsageError(f"--timeout {timeout_s:g} is not between 0.1 and 3600")
    answers = run_async(
        of_each(db, lambda history: history.sql(query or _SCHEMA, limit=limit, timeout_s=timeout_s))
    )
    for _, found in answers:
        if schema and not (as_json or as_csv):
            render.write_raw("".join(f"{row[2]};\n" for row in found.rows).encode())
        if found.too_large:
            say(
                f"cut after {len(found.rows)} rows, because more would be over 64 MB; ask for fewer or shorter columns"
            )
        elif found.cut:
            say(f"cut after {limit} rows; raise --limit to see more")
    if schema and not (as_json or as_csv):
        return
    _emit(answers, render.form_of(as_json=as_json, as_csv=as_csv))


def _emit(answers: list[tuple[str, QueryResult]], form: render.Form) -> None:
    """Write the rows of all databases under each other; with several, a first column says whose each row is."""
    whose = ["database"] if len(answers) > 1 else []
    names = _unique([*whose, *answers[0][1].columns])
    render.emit(
        [
            dict(zip(names, ([shown] if whose else []) + list(row), strict=True))
            for shown, found in answers
            for row in found.rows
        ],
        [render.Column(name) for name in names],
        form,
    )


def _unique(names: list[str]) -> list[str]:
    """Give columns of the same name names of their own, because a row is a mapping."""
    unique: list[str] = []
    for name in names:
        number = 2
        candidate = name
        while candidate in unique:
            candidate = f"{name}_{number}"
            number += 1
        unique.append(candidate)
    return unique
