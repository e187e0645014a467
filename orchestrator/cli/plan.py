"""What `resume` would do with each unfinished rollout, and what stands in its way; nothing is changed by asking."""

from __future__ import annotations

import asyncio
import hashlib
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator import assembly, errors, recovery
from orchestrator.cli import endpoints
from orchestrator.rollout import StoredInput, part_of
from orchestrator.states import FSM_VERSION, State

if TYPE_CHECKING:
    from collections.abc import Collection

    from orchestrator.settings import Settings
    from store.history import Record
    from store.look import Look


_LIST_S = 30.0
BEFORE_THE_PATCH = (State.CREATED, State.SANDBOX_READY, State.AGENT_RUNNING)


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One unfinished rollout."""

    row: Record
    given: StoredInput | None
    """What it was submitted with; None when that cannot be read."""
    action: str
    """What is done next."""
    blocked: str = ""
    """Why it is left alone; empty when it is taken up."""
    is_held: bool = False
    """A live worker has it."""
    trouble: str = ""
    """Of one that is held: what would stand in the way if it became free."""

    @property
    def needs_a_model(self) -> bool:
        """Whether its agent has work left."""
        return self.row["state"] in BEFORE_THE_PATCH

    @property
    def replay(self) -> Path | None:
        """The recorded turns that its model is, if it is none."""
        path = self.given.origin.get("replay") if self.given else None
        return Path(path) if path else None


async def make(store: Look, *, ids: Collection[str] | None, run: str | None, user: str | None) -> list[Item]:
    """Plan for every unfinished rollout among these; None stands for all."""
    items: list[Item] = []
    asked: dict[str, str] = {}
    for row in await store.history.unfinished():
        origin = part_of(row, "origin")
        wanted = (
            (ids is None or row["id"] in ids)
            and (run is None or row["run_id"] == run)
            and (user is None or origin.get("user", user) == user)
        )
        if wanted:
            items.append(await _item(store, row, asked))
    return items


async def _item(store: Look, row: Record, asked: dict[str, str]) -> Item:
    if row["held"] and not await store.is_dead(row["lease_owner"]):
        free = await _item(store, {**row, "held": 0}, asked)
        return Item(
            row=row, given=free.given, action="left to its worker", is_held=True, trouble=free.blocked,
            blocked=f"worker {row['lease_owner']} has it",
        )  # fmt: skip
    if row["endpoint_kind"] == "session" and not await recovery.is_orphan(store, row):
        return Item(
            row=row, given=None, action="left to its caller",
            blocked="the trainer that asked for it still runs",
        )  # fmt: skip
    if row["fsm_version"] > FSM_VERSION:
        newer = "a newer version of this program submitted it: resume with that"
        return Item(row=row, given=None, action="none", blocked=newer)
    try:
        given = StoredInput(row)
    except errors.InternalError as e:
        return Item(row=row, given=None, action="none", blocked=f"{e} ({e.hint})")
    item = Item(row=row, given=given, action=await _action(store, row))
    blocked = await _sandbox_trouble(store, row) or _source_trouble(item, given)
    if not blocked and item.needs_a_model:
        blocked = await _endpoint_trouble(item, given, asked)
    return replace(item, blocked=blocked) if blocked else item


async def _action(store: Look, row: Record) -> str:
    if row["endpoint_kind"] == "session" and row["state"] in BEFORE_THE_PATCH:
        return "end it as worker_lost: its caller's session is gone"
    boxes = await store.history.of_rollout("sandboxes", row["id"])
    may_go_on = any(box["status"] == "live" for box in boxes)
    match State(row["state"]):
        case State.CREATED:
            return "make a sandbox and start"
        case State.SANDBOX_READY | State.AGENT_RUNNING if not may_go_on:
            return "start anew: its sandbox is gone"
        case State.SANDBOX_READY:
            return "start the agent, in its sandbox if that is untouched"
        case State.AGENT_RUNNING:
            steps = await store.history.of_rollout("steps", row["id"])
            after = f"continue after {steps[-1]['name']}" if steps else "begin the agent's work"
            return f"{after} if its sandbox is usable, else start anew"
        case State.PATCHED:
            return "grade the stored patch"
        case _:
            return "release its sandboxes; its reward stays"


async def _sandbox_trouble(store: Look, row: Record) -> str:
    """Ask the authorities of its open sandboxes whether they answer here.

    Only a graded rollout has to wait for a sandbox that was given up already.
    """
    counted = ("intent", "live", "releasing") if row["state"] == State.GRADED else ("intent", "live")
    for box in await store.history.of_rollout("sandboxes", row["id"]):
        if box["status"] in counted:
            try:
                provider = assembly.provider_named(box["provider"])
                async with asyncio.timeout(_LIST_S):
                    await provider.list_ours(box["key"], box["provider_ref"])
            except TimeoutError:
                return f"its sandbox {box['key']}: {box['provider_ref']} does not answer"
            except errors.RolloutsError as e:
                hint = e.hint or "when it will never answer: rollouts clean --write-off"
                return f"its sandbox {box['key']}: {e} ({hint})"
    return ""


def _source_trouble(item: Item, given: StoredInput) -> str:
    path = given.repo_source.path if given.repo_source else None
    if item.row["state"] == State.GRADED or not path or Path(path).exists():
        return ""
    return f"its repository {path} is not here: put it back, or resume on the machine that has it"


async def _endpoint_trouble(item: Item, given: StoredInput, asked: dict[str, str]) -> str:
    if item.row["endpoint_kind"] == "session":
        return ""
    settings = given.settings
    if settings.llm.base_url and settings.llm.base_url.startswith(endpoints.REPLAY):
        return _replay_trouble(item, settings)
    variable = given.origin.get("key")
    if variable and not os.environ.get(variable):
        return f"{variable} is not set, the key of its model endpoint"
    where = f"{settings.llm.base_url} {settings.llm.model} {settings.llm.api_key_env}"
    if where not in asked:
        try:
            await endpoints.preflight(settings)
            asked[where] = ""
        except errors.UsageError as e:
            asked[where] = str(e)
    return asked[where]


def _replay_trouble(item: Item, settings: Settings) -> str:
    path = item.replay
    if path is None or not path.is_file():
        return f"its recorded turns {path or settings.llm.base_url} are not here"
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    except OSError as e:
        return f"its recorded turns {path} cannot be read: {e.strerror}"
    if not str(settings.llm.base_url).endswith(f"@{digest}"):
        return f"its recorded turns {path} have changed since"
    return ""
