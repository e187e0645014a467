"""Where the model answers: a real endpoint, looked at before anything is submitted, or recorded turns."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pydantic import SecretStr

from orchestrator import errors, identity
from orchestrator.agents.base import Endpoint
from orchestrator.cli.console import say
from orchestrator.settings import secret

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from pathlib import Path

    from orchestrator.settings import Settings
    from orchestrator.tasks.record import Task
    from store.history import Record

    EndpointOf = Callable[[Record, Settings], Endpoint]

REPLAY = "replay:"
REPLAY_MODEL = "replay"
_PREFLIGHT_S = 10.0
_NOBODY_BEHIND = frozenset({502, 503, 504})


def replay_settings(path: Path) -> dict[str, str]:
    """Return the settings that stand for recorded turns: the file's digest is what a model name is otherwise."""
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as e:
        raise errors.ConfigError(
            f"the replay file {path} cannot be read: {e.strerror}",
            hint="give the path of a YAML file of turns",
        ) from None
    return {"llm.base_url": f"{REPLAY}{path.name}@{digest[:12]}", "llm.model": REPLAY_MODEL}


def opened(
    settings: Settings, replay: Path | None, tasks: Sequence[Task], samples: int
) -> AbstractAsyncContextManager[EndpointOf]:
    """Return the endpoints of a run, open as long as the context lasts; raises `errors.UsageError`."""
    return _real(settings) if replay is None else _recorded(replay, tasks, samples)


def origin(settings: Settings, replay: Path | None) -> dict[str, str]:
    """Return what whoever resumes a rollout needs to know of where it was asked for; never the key itself."""
    known = {"user": identity.user()}
    if replay is not None:
        known["replay"] = str(replay.absolute())
    elif os.environ.get(settings.llm.api_key_env):
        known["key"] = settings.llm.api_key_env
    return known


@asynccontextmanager
async def _recorded(path: Path, tasks: Sequence[Task], samples: int) -> AsyncIterator[EndpointOf]:
    from orchestrator.testing.replay import load_replay

    script = await asyncio.to_thread(load_replay, path)
    unknown = sorted(
        {t.instance_id for t in tasks for s in range(samples) if script.scenario(t.instance_id, s) is None}
    )
    if unknown:
        raise errors.UsageError(
            f"{path} has no turns for {', '.join(unknown)}",
            hint=f"it has turns for: {', '.join(script.scenarios)}",
        )
    async with recorded(path) as endpoint_of:
        yield endpoint_of


@asynccontextmanager
async def recorded(path: Path) -> AsyncIterator[EndpointOf]:
    """Serve the turns of a replay file, whichever instances it has."""
    from orchestrator.testing.model_server import ScriptedModel
    from orchestrator.testing.replay import load_replay

    script = await asyncio.to_thread(load_replay, path)
    say(f"playing recorded turns of {path}: no model is involved")
    async with ScriptedModel(script) as server:
        key = SecretStr("EMPTY")

        def endpoint_of(row: Record, _settings: Settings) -> Endpoint:
            url = server.base_url(row["instance_id"], row["sample"])
            return Endpoint(base_url=url, model=REPLAY_MODEL, api_key=key)

        yield endpoint_of


@asynccontextmanager
async def _real(settings: Settings) -> AsyncIterator[EndpointOf]:
    await preflight(settings)
    yield stored_endpoint


def stored_endpoint(_row: Record, settings: Settings) -> Endpoint:
    """Return the endpoint that a rollout's own settings name; its key is read anew each time."""
    return Endpoint(
        base_url=_base_url(settings), model=settings.llm.model, api_key=secret(settings.llm.api_key_env)
    )


def _base_url(settings: Settings) -> str:
    if not settings.llm.base_url:
        raise errors.UsageError(
            "no model endpoint is named",
            hint="give --base-url URL (or OPENAI_BASE_URL) and --model NAME, or --model replay:FILE",
        )
    return settings.llm.base_url


def check_named(settings: Settings) -> None:
    """Raise `errors.UsageError` unless an endpoint and a model are named."""
    parts = urlsplit(_base_url(settings))
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise errors.UsageError(
            f"{_shown(settings)} is not the address of a model endpoint",
            hint="give a base URL such as http://127.0.0.1:8000/v1",
        )
    if not settings.llm.model:
        raise errors.UsageError("no model is named", hint="give --model NAME, as the endpoint calls it")


async def preflight(settings: Settings) -> None:
    """Ask the endpoint for its models, so that a dead one or a wrong key is found before rollouts are spent on it.

    Raises `errors.UsageError`. An endpoint that answers but does not know the question is taken as it is.
    """
    import httpx

    check_named(settings)
    name = settings.llm.api_key_env
    headers = {"Authorization": f"Bearer {secret(name).get_secret_value()}"}
    url = f"{_base_url(settings).rstrip('/')}/models"
    try:
        async with httpx.AsyncClient(trust_env=False, timeout=_PREFLIGHT_S) as client:
            response = await client.get(url, headers=headers)
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as e:
        raise errors.UsageError(
            f"the model endpoint {_shown(settings)} cannot be reached: {_reason(e)}",
            hint="start the server or correct --base-url; nothing was submitted",
        ) from None
    if response.status_code in (401, 403):
        raise errors.UsageError(
            f"the model endpoint {_shown(settings)} refuses the key in {name} (status {response.status_code})",
            hint=f"set {name}, or name another variable with --api-key-env; nothing was submitted",
        )
    if response.status_code in _NOBODY_BEHIND:
        raise errors.UsageError(
            f"the model endpoint {_shown(settings)} answers with status {response.status_code}",
            hint="wait until the model is served; nothing was submitted",
        )
    known = _names(response.content) if response.status_code == 200 else []
    if known and settings.llm.model not in known:
        say(
            f"warning: {_shown(settings)} does not list {settings.llm.model!r}; it lists {', '.join(known[:5])}"
        )


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def _names(body: bytes) -> list[str]:
    try:
        listed: Any = json.loads(body)
        return [str(model["id"]) for model in listed["data"]]
    except (ValueError, KeyError, TypeError):
        return []  # not OpenAI's form: nothing to compare with


def _shown(settings: Settings) -> str:
    parts = urlsplit(_base_url(settings))
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()
