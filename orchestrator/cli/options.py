"""Options that several commands share, each declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Db = Annotated[
    str | None,
    typer.Option(
        "--db",
        metavar="URL",
        help="Database: sqlite:///PATH, a path, or postgresql://... Default: ROLLOUTS_DATABASE_URL, else logs/rollouts.db.",
        show_default=False,
    ),
]
Dbs = Annotated[
    list[str] | None,
    typer.Option(
        "--db",
        metavar="URL",
        help="As for `run`; may be repeated, and a path may hold * and ?: then all of these databases are read.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object per line; times in epoch milliseconds.")]
Csv = Annotated[bool, typer.Option("--csv", help="CSV with a header line.")]
Tasks = Annotated[
    Path,
    typer.Argument(
        metavar="TASKS",
        help="A .jsonl or .json file, a task folder, or a folder of these.",
        show_default=False,
    ),
]
Config = Annotated[
    str,
    typer.Option("--config", metavar="NAME", help="A configuration below aweagent/configs, or a YAML file."),
]
AllowNoIsolation = Annotated[
    bool,
    typer.Option(
        "--allow-no-isolation", help="Run even where this machine offers no isolation of sandboxes."
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="SECTION.KEY=VALUE", help="Change one setting; may be repeated.", show_default=False
    ),
]
