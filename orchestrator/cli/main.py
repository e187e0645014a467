"""The `rollouts` command: the list of commands, and the one place where errors become messages and exit codes."""

from __future__ import annotations

import sys
from typing import Annotated, NoReturn

import typer

from orchestrator import errors
from orchestrator.cli import clean, db, doctor, look, resume, run, sql, status, validate
from orchestrator.cli.console import complain, show_warnings
from store import errors as store_errors

_WRONG = 1
_USAGE = 2
_RUN, _LOOK, _AFTER, _KEEP = "Run", "Look", "After a crash", "Keep"

app = typer.Typer(
    name="rollouts",
    help="Run SWE-bench rollouts as persisted state machines, and ask what happened.",
    epilog="Exit codes: 0 done, 1 something is wrong, 2 wrong usage (nothing was started), 130 interrupted, 143 terminated.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _options(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks and the program's log; may stand anywhere.")
    ] = False,
) -> None:
    """Run SWE-bench rollouts as persisted state machines, and ask what happened."""


app.command("run", rich_help_panel=_RUN)(run.run)
app.command("validate", rich_help_panel=_RUN)(validate.validate)
app.command("status", rich_help_panel=_LOOK)(status.status)
app.command("list", rich_help_panel=_LOOK)(look.list_rollouts)
app.command("show", rich_help_panel=_LOOK)(look.show)
app.command("sql", rich_help_panel=_LOOK)(sql.sql)
app.command("doctor", rich_help_panel=_KEEP)(doctor.doctor)
app.command("resume", rich_help_panel=_AFTER)(resume.resume)
app.command("clean", rich_help_panel=_AFTER)(clean.clean)
app.add_typer(db.app, name="db", rich_help_panel=_KEEP)


def main() -> NoReturn:
    """Run the command line and exit."""
    arguments = [a for a in sys.argv[1:] if a != "--debug"]
    debug = len(arguments) < len(sys.argv) - 1
    show_warnings(debug=debug)
    try:
        app(args=arguments, prog_name="rollouts")
    except (errors.RolloutsError, store_errors.StoreError) as e:
        if debug:
            raise
        complain(str(e), e.hint)
        sys.exit(_exit_code(e))
    except Exception as e:
        if debug:
            raise
        complain(f"unforeseen: {type(e).__name__}: {e}", "repeat with --debug to see where")
        sys.exit(_WRONG)
    sys.exit(0)


def _exit_code(error: errors.RolloutsError | store_errors.StoreError) -> int:
    usage = (errors.UsageError, store_errors.StoreUnusable, store_errors.NeverReached, store_errors.Conflict)
    return _USAGE if isinstance(error, usage) else _WRONG
