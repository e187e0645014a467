"""`rollouts db`: the database's schema, seen and brought forward, and whether everything that guards it is in place."""

from __future__ import annotations

import typer

from orchestrator.cli import render
from orchestrator.cli.console import say
from orchestrator.cli.edge import database_url
from orchestrator.cli.options import Csv, Db, Json

app = typer.Typer(help="See, check and upgrade the database's schema.", no_args_is_help=True)


@app.command()
def current(db: Db = None, as_json: Json = False, as_csv: Csv = False) -> None:
    """Print the schema revision of the database, and the one of this program."""
    from store import revisions, soundness

    row = {"revision": soundness.standing(database_url(db)), "head": revisions.newest()}
    render.emit([row], [render.Column(name) for name in row], render.form_of(as_json=as_json, as_csv=as_csv))


@app.command()
def upgrade(db: Db = None) -> None:
    """Bring the database to this program's schema, or create it; rows are kept."""
    import uuid

    from orchestrator.states import EDGES
    from store import engine, revisions, soundness

    url = database_url(db)
    edges = {(source.value, trigger, to.value) for (source, trigger), to in EDGES.items()}
    before, head = soundness.bring_forward(url, edges, store_uuid=str(uuid.uuid4())), revisions.newest()
    where = engine.shown(engine.parse_url(url))
    if before is not None and before >= head:
        say(f"{where} is at schema {before} already")
    else:
        say(f"{where}: {f'upgraded from schema {before}' if before else 'created'}, now at {head}")


@app.command()
def check(db: Db = None, as_json: Json = False, as_csv: Csv = False) -> None:
    """Look for a schema that is behind, guards or indexes that are missing, and damage; exit code 1 when there is any."""
    from store import engine, soundness

    url = database_url(db)
    found = soundness.complaints(url)
    if found:
        problems = [{"problem": problem} for problem in found]
        render.emit(problems, [render.Column("problem")], render.form_of(as_json=as_json, as_csv=as_csv))
    say(f"{engine.shown(engine.parse_url(url))}: {f'{len(found)} found' if found else 'sound'}")
    raise typer.Exit(1 if found else 0)
