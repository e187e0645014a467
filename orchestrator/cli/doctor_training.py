"""`rollouts doctor --training`: what the worker of a trainer needs, asked before it takes a GPU.

Whatever fails here would leave every rollout of that worker without a reward. The database is opened as the first call of
a trainer opens it, so it is made or brought forward.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator import errors, settings
from orchestrator.cli.doctor import Finding, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from packaging.requirements import Requirement

_CHECKOUT = Path(__file__).resolve().parents[2]
_ROOTS = ("AWEAGENT_ROOT", "SWE_AGENT_ROOT", "SWEAGENT_ROOT")
"""Where AReaL looks for this checkout, strongest first; it goes before everything else on its import path."""
_IMPORT_S = 120.0
"""Importing from a network file system with a cold cache takes long."""
_IMPORT = """\
import sys
if sys.argv[1] and sys.argv[1] not in sys.path:
    sys.path.insert(0, sys.argv[1])
import aweagent.lifecycle, aweagent.runner, orchestrator.areal
from orchestrator.entry import loading
loading.load("swe")
print(aweagent.lifecycle.__file__)
"""
_ANY_ENDPOINT = {"llm.base_url": "http://127.0.0.1/v1"}
"""A trainer names the endpoint with each call, so that a bad OPENAI_BASE_URL does not matter to it."""


async def checks() -> list[Finding]:
    """Return what a training worker lacks, and what it has."""
    named = settings.variable("SWEAgent_CONFIG")
    return [
        *await _store(),
        _requirements(_wanted()),
        _configurations([*settings.config_names(), *([named] if named else [])]),
        _agent(settings.variable("SWEAgent_AGENT_TYPE", "swe").strip().lower()),
        *await asyncio.to_thread(_entry),
    ]


async def _store() -> list[Finding]:
    from orchestrator import assembly
    from store import engine
    from store import errors as store_errors

    url, guessed = settings.entry_database_url()
    named = Finding("ROLLOUTS_DATABASE_URL", Verdict.OK, "set")
    if guessed:
        found = "not set, so that each host has a file of its own"
        named = Finding("ROLLOUTS_DATABASE_URL", Verdict.WARN, found, guessed)
    try:
        parsed = engine.parse_url(url)
    except store_errors.StoreUnusable as e:  # its message repeats the URL, secrets and all
        found = "ROLLOUTS_DATABASE_URL is no URL of a database for this program"
        return [named, Finding("store", Verdict.FAIL, found, e.hint)]
    shown = engine.shown(parsed.set(query={}))
    try:
        await (await assembly.open_store(url)).close()
    except (store_errors.StoreError, OSError) as e:
        hint = getattr(e, "hint", "") or "mend it, or name another place"
        hint = hint.replace("--db or ", "").replace("--db", "ROLLOUTS_DATABASE_URL")
        return [
            named,
            Finding("store", Verdict.FAIL, str(e).replace(engine.shown(parsed), shown), hint),
        ]
    return [named, Finding("store", Verdict.OK, f"{shown} opens and takes writes")]


def _wanted() -> list[str]:
    """Return this program's requirements; an installed one has no requirements.txt beside it."""
    file = _CHECKOUT / "requirements.txt"
    if file.is_file():
        return file.read_text(encoding="utf-8").splitlines()
    return [text for text in importlib.metadata.requires("areal-sweagent") or () if "extra ==" not in text]


def _requirements(wanted: Iterable[str]) -> Finding:
    todo = f"pip install -r {_CHECKOUT / 'requirements.txt'}"
    try:
        from packaging.requirements import Requirement
    except ImportError:  # plotly, which is required, brings it
        return Finding("requirements", Verdict.FAIL, "packaging is not installed", todo)
    parsed = [Requirement(text) for text in wanted]
    unmet = [problem for requirement in parsed for problem in _unmet(requirement)]
    if unmet:
        return Finding("requirements", Verdict.FAIL, "; ".join(unmet), todo)
    return Finding("requirements", Verdict.OK, f"{len(parsed)} of {len(parsed)} are satisfied")


def _unmet(wanted: Requirement) -> Iterator[str]:
    """Say what of one requirement is missing or too old, the packages of its extras included."""
    from packaging.requirements import Requirement

    try:
        version = importlib.metadata.version(wanted.name)
    except importlib.metadata.PackageNotFoundError:
        yield f"{wanted.name} is not installed"
        return
    if not wanted.specifier.contains(version, prereleases=True):
        yield f"{wanted.name} is {version}, not {wanted.specifier}"
    for text in importlib.metadata.requires(wanted.name) or ():
        part = Requirement(text)
        marker = part.marker
        if marker is None or marker.evaluate({"extra": ""}):
            continue
        if any(marker.evaluate({"extra": extra}) for extra in wanted.extras):
            yield from _unmet(part)


def _configurations(names: Iterable[str]) -> Finding:
    loaded, broken = 0, []
    for name in names:
        try:
            settings.load(name, arguments=_ANY_ENDPOINT)
            loaded += 1
        except errors.ConfigError as e:
            broken.append(f"{e} ({e.hint})" if e.hint else str(e))
    if broken:
        return Finding("configurations", Verdict.FAIL, "; ".join(broken), "correct them")
    return Finding("configurations", Verdict.OK, f"{loaded} load")


def _agent(kind: str) -> Finding:
    from orchestrator.agents import registry

    if kind in registry.AGENT_NAMES:
        return Finding("agent", Verdict.OK, kind)
    known = ", ".join(registry.AGENT_NAMES)
    return Finding(
        "agent",
        Verdict.FAIL,
        f"SWEAgent_AGENT_TYPE asks for {kind}, whose rollouts all end without a reward: there is no such agent here",
        f"choose one of: {known}",
    )


def _entry() -> Iterator[Finding]:
    """Import what AReaL imports, the way it does, in a process of its own: this one has its own import path."""
    name = next((name for name in _ROOTS if settings.variable(name)), "")
    root = settings.variable(name) if name else ""
    if root and not Path(root).is_dir():
        yield Finding(
            "checkout", Verdict.WARN, f"{name} names {root}, which is no folder", f"set it to {_CHECKOUT}"
        )
        root = ""
    command = [sys.executable, "-P", "-c", _IMPORT, str(Path(root).absolute()) if root else ""]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_S, check=False)
    except subprocess.TimeoutExpired:
        todo = "look at the file system that Python and this checkout are on"
        yield Finding("entry", Verdict.FAIL, f"cannot be imported within {_IMPORT_S:g} s", todo)
        return
    if ran.returncode:
        said = ran.stderr.strip().splitlines()
        yield Finding(
            "entry",
            Verdict.FAIL,
            f"cannot be imported: {said[-1] if said else f'exit code {ran.returncode}'}",
            f"put {_CHECKOUT} first on PYTHONPATH and name it in AWEAGENT_ROOT; install its requirements.txt",
        )
        return
    file = Path(ran.stdout.strip())
    if file.resolve().parents[1] == _CHECKOUT:
        yield Finding("entry", Verdict.OK, f"{file} can be imported")
    else:
        todo = f"if {_CHECKOUT} is meant, put it first on PYTHONPATH and name it in AWEAGENT_ROOT"
        yield Finding("entry", Verdict.WARN, f"workers import {file}, not what runs here", todo)
