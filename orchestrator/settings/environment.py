"""What only the environment says: where things are kept, and the keys, which are never stored."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import SecretStr

if TYPE_CHECKING:
    from collections.abc import Mapping


def cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Return this program's folder in the platform's cache directory; it may not exist yet."""
    variables = os.environ if environ is None else environ
    base = variables.get("XDG_CACHE_HOME") or str(Path(variables.get("HOME") or "~").expanduser() / ".cache")
    return Path(base) / "areal-sweagent"


def database_url(argument: str | None, environ: Mapping[str, str] | None = None) -> str:
    """Return the store's URL: argument, then `ROLLOUTS_DATABASE_URL`, then `$LOG_DIR/rollouts.db` (`./logs`)."""
    variables = os.environ if environ is None else environ
    chosen = argument or variables.get("ROLLOUTS_DATABASE_URL", "").strip()
    return as_url(chosen or str(Path(variables.get("LOG_DIR") or "logs") / "rollouts.db"))


def as_url(text: str) -> str:
    """Return the URL of a database; a path is a SQLite file."""
    return text if ":" in text.partition("/")[0] else f"sqlite:///{text}"


def _state_dir(variables: Mapping[str, str]) -> Path:
    if variables.get("XDG_STATE_HOME"):
        return Path(variables["XDG_STATE_HOME"]) / "areal-sweagent"
    return Path(variables.get("HOME") or "~").expanduser() / ".local" / "state" / "areal-sweagent"


def entry_database_url(environ: Mapping[str, str] | None = None) -> tuple[str, str]:
    """Return the store's URL for a trainer's calls, and, where nobody named one, what to do about it.

    Without `ROLLOUTS_DATABASE_URL` it is one file per host in node-local storage: `ROLLOUTS_LOCAL_DIR`, else the platform's
    state directory; `LOG_DIR` differs from process to process there, and is often on a network file system.
    """
    variables = os.environ if environ is None else environ
    if variables.get("ROLLOUTS_DATABASE_URL", "").strip():
        return as_url(variables["ROLLOUTS_DATABASE_URL"]), ""
    named = variables.get("ROLLOUTS_LOCAL_DIR")
    home = Path(variables.get("HOME") or "~").expanduser()
    base = Path(
        named or Path(variables.get("XDG_STATE_HOME") or home / ".local" / "state") / "areal-sweagent"
    )
    url = f"sqlite:///{base.absolute() / f'rollouts-{socket.gethostname()}.db'}"
    return url, (
        "set ROLLOUTS_DATABASE_URL to a PostgreSQL database when there are several hosts, or ROLLOUTS_LOCAL_DIR to another"
        " folder on a disk of this host"
    )


def maintenance_database_url(environ: Mapping[str, str] | None = None) -> tuple[str, str]:
    """Return the URL that clean-up after a training job opens, and a warning where that is a guess.

    It is the one of the job's calls on this host; where there is no such file, `LOG_DIR` decides.
    """
    variables = os.environ if environ is None else environ
    url, guessed = entry_database_url(variables)
    if not guessed or Path(url.removeprefix("sqlite:///")).exists():
        return url, ""
    other = database_url(None, variables)
    return other, (
        f"ROLLOUTS_DATABASE_URL is not set and {url} does not exist, so LOG_DIR decided; where the job's workers ran with"
        " another LOG_DIR or on another host, this is not their database: set ROLLOUTS_DATABASE_URL for both"
    )


def secret(name: str, environ: Mapping[str, str] | None = None) -> SecretStr:
    """Return the API key that the variable `name` holds; endpoints that want none get a placeholder."""
    variables = os.environ if environ is None else environ
    return SecretStr(variables.get(name) or "EMPTY")


def variable(name: str, default: str = "", environ: Mapping[str, str] | None = None) -> str:
    """Return an environment variable, `default` where it is unset or empty."""
    variables = os.environ if environ is None else environ
    return variables.get(name) or default
