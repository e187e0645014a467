"""`rollouts doctor`: can this machine run rollouts with these settings? Looks and asks; whatever it makes it removes.

Only `--training` leaves something behind: the database that a trainer's calls use.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import os
import platform
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from orchestrator import errors
from orchestrator.cli import render
from orchestrator.cli.console import say
from orchestrator.cli.edge import database_url, run_async
from orchestrator.cli.options import Db, Json

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from orchestrator.settings import SandboxSettings

_WRONG = 1
_CONFIG = "train"
_TIMEOUT_S = 5.0
_DISTRIBUTION = "areal-sweagent"
_PACKAGES = ("sqlalchemy", "aiosqlite", "psycopg", "openai", "transitions")
_PYTHON = (3, 11)
_SQLITE = (3, 35, 0)
"""The first with RETURNING."""
_NOBODY_BEHIND = (502, 503, 504)
_AENV_PORT = 8080
"""Of the control plane; AEnvironment's SDK takes only the host of AENV_SYSTEM_URL."""


class Verdict(StrEnum):
    """What a check came to."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was looked at, what was found, and what to do where that is not well."""

    check: str
    verdict: Verdict
    found: str
    todo: str = ""


def doctor(
    db: Db = None,
    base_url: Annotated[
        str | None,
        typer.Option(
            "--base-url",
            metavar="URL",
            help="Also ask this model endpoint. Default: OPENAI_BASE_URL.",
            show_default=False,
        ),
    ] = None,
    training: Annotated[
        bool,
        typer.Option(
            "--training",
            help="Check what a worker of AReaL needs; opens the database of its calls, and makes it where it is missing.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Check what rollouts need on this machine; exit code 1 when something is missing or does not work."""
    if training and db:
        raise errors.UsageError(
            "a trainer's calls know no --db", hint="name their database in ROLLOUTS_DATABASE_URL"
        )
    logging.getLogger("orchestrator.sandbox").setLevel(logging.ERROR)  # its warnings are findings here
    looked = () if training else _database(db)
    findings = [*_versions(), *looked, *_folders(), *run_async(_asked(base_url, training)), *_programs()]
    rows = [asdict(finding) for finding in findings]
    render.emit(
        rows, [render.Column(name) for name in rows[0]], render.form_of(as_json=as_json, as_csv=False)
    )
    failed, warned = (sum(f.verdict is v for f in findings) for v in (Verdict.FAIL, Verdict.WARN))
    say(f"{len(findings)} checks: {failed} failed, {warned} with a warning")
    if failed:
        raise typer.Exit(_WRONG)


def _versions() -> Iterator[Finding]:
    new_enough = sys.version_info[:2] >= _PYTHON
    yield Finding(
        "python",
        Verdict.OK if new_enough else Verdict.FAIL,
        f"{platform.python_version()} at {sys.executable}",
        "" if new_enough else "install Python 3.11 or newer",
    )
    here = Path(__file__).resolve().parents[2]
    version = _version(_DISTRIBUTION)
    if version:
        yield Finding(_DISTRIBUTION, Verdict.OK, f"{version}, running from {here}")
    else:
        yield Finding(
            _DISTRIBUTION, Verdict.WARN, f"not installed, running from {here}", f"pip install -e {here}"
        )
    for name in _PACKAGES:
        version = _version(name)
        todo = "" if version else f"pip install -r {here / 'requirements.txt'}"
        yield Finding(name, Verdict.OK if version else Verdict.FAIL, version or "not installed", todo)
    yield Finding("aenvironment", Verdict.OK, _version("aenvironment") or "not installed (extra aenv)")
    new_enough = sqlite3.sqlite_version_info >= _SQLITE
    yield Finding(
        "sqlite",
        Verdict.OK if new_enough else Verdict.FAIL,
        sqlite3.sqlite_version,
        "" if new_enough else "use a Python with SQLite 3.35 or newer, or PostgreSQL",
    )


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _database(argument: str | None) -> Iterator[Finding]:
    """Look at the database without making one."""
    from orchestrator import settings
    from store import engine, place
    from store import errors as store_errors
    from store.standing import file_system

    names = ("ROLLOUTS_DATABASE_URL", "LOG_DIR")
    origin = "--db" if argument else next((name for name in names if settings.variable(name)), "the default")
    url = database_url(argument)
    try:
        parsed = engine.parse_url(url)
    except store_errors.StoreUnusable as e:  # its message repeats the URL, secrets and all
        yield Finding(
            "database", Verdict.FAIL, f"what {origin} gives is no URL of a database for this program", e.hint
        )
        return
    shown = engine.shown(parsed.set(query={}))
    yield Finding("database", Verdict.OK, f"{shown}, from {origin}")
    if parsed.get_backend_name() == "sqlite":
        file = place.file_of(parsed)
        kind, safe = file_system(file)
        todo = "" if safe else "set --db or ROLLOUTS_DATABASE_URL to a file on a local disk"
        yield Finding("file system", Verdict.OK if safe else Verdict.FAIL, f"{kind} below {file}", todo)
        if not file.exists():
            yield _not_made_yet("schema", file, Verdict.WARN)
            return
    try:
        yield _schema(url)
    except store_errors.StoreError as e:
        yield Finding("schema", Verdict.FAIL, str(e).replace(engine.shown(parsed), shown), e.hint)


def _schema(url: str) -> Finding:
    from store import revisions, soundness

    at, newest = soundness.standing(url), revisions.newest()
    if at == newest:
        return Finding("schema", Verdict.OK, f"{at}, the newest")
    if at is not None and at > newest:
        return Finding("schema", Verdict.OK, f"{at}, newer than this program's {newest} and open to it")
    found = f"{at}, behind {newest}" if at else "none: the database is empty"
    return Finding("schema", Verdict.FAIL, found, "rollouts db upgrade")


def _not_made_yet(check: str, path: Path, verdict: Verdict = Verdict.OK) -> Finding:
    """Say that something will be made by the first run, if the folder it belongs into lets it."""
    there = _nearest(path)
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        found = f"{path} is not there and cannot be made in {there}"
        return Finding(check, Verdict.FAIL, found, "make it, or name another place")
    return Finding(check, verdict, f"{path} is not there yet: the first run makes it")


def _nearest(path: Path) -> Path:
    """Return the path itself or the closest folder above it that exists."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


def _folders() -> Iterator[Finding]:
    from orchestrator import settings

    log_dir = Path(settings.variable("LOG_DIR", "logs")).absolute()
    cache = settings.cache_dir()
    for check, folder in (("LOG_DIR", log_dir), ("cache", cache)):
        if not folder.exists():
            yield _not_made_yet(check, folder)
        elif folder.is_dir() and os.access(folder, os.W_OK | os.X_OK):
            yield Finding(check, Verdict.OK, str(folder))
        else:
            yield Finding(check, Verdict.FAIL, f"{folder} is no folder that can be written", "mend it")
    pythons = sorted(cache.glob("pytest-env-*/bin/python"))
    yield (
        Finding("task Python", Verdict.OK, str(pythons[-1]))
        if pythons
        else Finding(
            "task Python",
            Verdict.WARN,
            "not made yet: the first run takes pytest from the package index",
            "be connected then, or set sandbox.python to an interpreter that has pytest",
        )
    )


async def _asked(base_url: str | None, training: bool) -> list[Finding]:
    """Make the checks that wait for programs and servers, all at once."""
    checks = [_isolation(), _aenv()]
    if base_url or not training:  # a trainer names the endpoint with each call
        checks.insert(1, _model(base_url))
    if training:
        from orchestrator.cli import doctor_training

        checks.insert(0, doctor_training.checks())
    groups = await asyncio.gather(*checks)
    return [finding for group in groups for finding in group]


async def _isolation() -> list[Finding]:
    """Try a sandbox as a run does, but leave neither a folder of sandboxes nor a Python environment behind."""
    from orchestrator import settings

    box = settings.load(_CONFIG, environ={}).sandbox
    root = (box.root or Path(tempfile.gettempdir()) / _DISTRIBUTION).absolute()
    if root.exists():
        where = Finding("sandbox root", Verdict.OK, str(root))
        return [where, *await _tried(box)]
    where = _not_made_yet("sandbox root", root)
    if where.verdict is Verdict.FAIL:
        return [where]
    with tempfile.TemporaryDirectory(prefix=f"{_DISTRIBUTION}.doctor-", dir=_nearest(root)) as folder:
        return [where, *await _tried(box.model_copy(update={"root": Path(folder)}))]


async def _tried(box: SandboxSettings) -> list[Finding]:
    from orchestrator import settings
    from orchestrator.sandbox import registry

    python = box.python or Path(sys.executable)
    provider = registry.make(box.model_copy(update={"python": python}), cache_dir=settings.cache_dir())
    try:
        isolation = await provider.preflight()
    except (errors.RolloutsError, OSError) as e:
        return [Finding("isolation", Verdict.FAIL, str(e), getattr(e, "hint", ""))]
    finally:
        await provider.close()
    gaps = provider.gaps
    return [
        Finding("isolation", Verdict.OK, isolation.value),
        *(Finding("cgroup", Verdict.WARN, gap, "give the worker a cgroup it may write") for gap in gaps),
        *([] if gaps else [Finding("cgroup", Verdict.OK, "the number of processes is capped")]),
    ]


async def _model(base_url: str | None) -> list[Finding]:
    """Ask the model endpoint for its models, if one is named."""
    from orchestrator import settings

    try:
        llm = settings.load(_CONFIG, arguments={"llm.base_url": base_url or None}).llm
    except errors.ConfigError as e:
        return [Finding("model endpoint", Verdict.FAIL, str(e), e.hint)]
    if not llm.base_url:
        return []
    key = settings.secret(llm.api_key_env).get_secret_value()
    headers = {"Authorization": f"Bearer {key}"}
    return [
        await _answer(
            "model endpoint",
            f"{llm.base_url.rstrip('/')}/models",
            headers,
            refused=f"set {llm.api_key_env} to a key that it takes",
            silent="start the server or correct --base-url (OPENAI_BASE_URL)",
        )
    ]


async def _aenv() -> list[Finding]:
    """Ask AEnvironment's control plane, if one is named, at the address that its SDK makes of the name."""
    from orchestrator import settings

    named = settings.variable("AENV_SYSTEM_URL")
    if not named:
        return []
    try:
        host = urlsplit(named if "//" in named else f"//{named}").hostname
    except ValueError:
        host = None
    if not host:
        return [Finding("AEnvironment", Verdict.FAIL, "AENV_SYSTEM_URL names no host", "write http://HOST")]
    if ":" in host:
        host = f"[{host}]"
    return [
        await _answer(
            "AEnvironment",
            f"http://{host}:{_AENV_PORT}/health",
            {},
            refused="give this machine access to it",
            silent="start AEnvironment or correct AENV_SYSTEM_URL",
        )
    ]


async def _answer(check: str, url: str, headers: dict[str, str], *, refused: str, silent: str) -> Finding:
    """Send one GET; whatever a server says that is neither a refusal nor a gateway's excuse will do."""
    import httpx

    where = _without_secrets(url)
    try:
        async with httpx.AsyncClient(trust_env=False, timeout=_TIMEOUT_S) as client:
            status = (await client.get(url, headers=headers)).status_code
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as e:
        reason = str(e).replace(url, where) or type(e).__name__
        return Finding(check, Verdict.FAIL, f"{where} cannot be reached: {reason}", silent)
    found = f"{where} answers with status {status}"
    if status in (401, 403):
        return Finding(check, Verdict.FAIL, found, refused)
    return Finding(
        check, *((Verdict.FAIL, found, silent) if status in _NOBODY_BEHIND else (Verdict.OK, found))
    )


def _without_secrets(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()


def _programs() -> Iterable[Finding]:
    from orchestrator import settings

    named = settings.variable("ROLLOUTS_CCGATEWAY")
    gateway = shutil.which(named or "ccgateway")
    if gateway:
        yield Finding("ccgateway", Verdict.OK, str(Path(gateway).absolute()))
    elif named:
        yield Finding(
            "ccgateway", Verdict.FAIL, f"ROLLOUTS_CCGATEWAY names {named}, which cannot be run", "correct it"
        )
    else:
        yield Finding(
            "ccgateway",
            Verdict.WARN,
            "not found; the agents cc, codex, opencode and oh need it, swe does not",
            "build it from gateway_go and put it on PATH, or name it in ROLLOUTS_CCGATEWAY",
        )
    for name in ("git", "bash"):
        yield _program(name)


def _program(name: str) -> Finding:
    path = shutil.which(name)
    if path is None:
        return Finding(name, Verdict.FAIL, "not found on PATH", f"install {name}")
    try:
        ran = subprocess.run(
            [path, "--version"], check=True, capture_output=True, text=True, timeout=_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError) as e:
        return Finding(name, Verdict.FAIL, f"{path} does not run: {e}", f"install {name} anew")
    return Finding(name, Verdict.OK, f"{ran.stdout.partition(chr(10))[0]} at {path}")
