"""`rollouts resume`: go on with what dead workers left, each rollout from where it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from orchestrator import errors, identity
from orchestrator.cli import render
from orchestrator.cli.console import say
from orchestrator.cli.edge import INTERRUPTED, database_urls, holder_of, of_each, run_async
from orchestrator.cli.options import AllowNoIsolation, Csv, Dbs, Json
from orchestrator.states import TERMINAL

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AsyncExitStack

    from orchestrator.agents.base import Endpoint
    from orchestrator.assembly import Worker
    from orchestrator.cli.endpoints import EndpointOf
    from orchestrator.cli.plan import Item
    from orchestrator.sandbox.base import SandboxProvider
    from orchestrator.settings import Settings
    from store.history import Record
    from store.look import Look
    from store.rollouts import Store

Row = dict[str, object]
"""One line of the answer."""

_PLAN = tuple(render.Column(name) for name in ("id", "instance_id", "state", "action", "blocked"))
_RESULT = tuple(
    render.Column(name) for name in ("id", "instance_id", "was", "now", "reward", "outcome", "message")
)


def resume(
    ids: Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="Rollouts, by a unique beginning of their ids.", show_default=False)] = None,
    run: Annotated[str | None, typer.Option("--run", help="Only rollouts of this run.", show_default=False)] = None,
    every: Annotated[bool, typer.Option("--all", help="Also rollouts that somebody else started.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the plan.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Also wait for rollouts that live workers have.")] = False,
    concurrency: Annotated[int, typer.Option("-j", "--concurrency", min=1, help="Rollouts at a time.")] = 4,
    allow_no_isolation: AllowNoIsolation = False,
    db: Dbs = None,
    as_json: Json = False,
    as_csv: Csv = False,
) -> None:  # fmt: skip
    """Take up unfinished rollouts whose workers are gone. Without arguments: those that you started.

    A stored patch is graded and never made again; a stored reward stays. Repeating the command is harmless. Exit code 1:
    a rollout ended without a reward, is not over, or had to be left; those that live workers have do not count.
    """
    form = render.form_of(as_json=as_json, as_csv=as_csv)
    if run is not None and not run.strip():
        raise errors.UsageError("--run needs a name", hint="leave it out for all of your runs")
    urls = database_urls(db)
    shares: dict[str, list[str] | None] = {urls[0]: ids or None}
    if len(urls) > 1:
        shares = run_async(_shares(urls, ids, run))
    asked = _Asked(
        run=run,
        user=None if ids or run or every else identity.user(),
        wait=wait,
        concurrency=concurrency,
        allow_no_isolation=allow_no_isolation,
    )
    code, rows = 0, list[Row]()
    try:
        for url, own in shares.items():
            try:
                done = run_async((_only_plan if dry_run else _resume)(url, own, asked))
            except errors.NothingKnown as e:
                if len(urls) == 1:
                    raise
                say(f"{e}; {e.hint}")
                code = max(code, 1)
                continue
            code, rows = max(code, done.code), rows + done.rows
            if code == INTERRUPTED:
                break
    finally:
        if rows:
            render.emit(rows, _PLAN if dry_run else _RESULT, form)
    raise typer.Exit(code)


async def _shares(
    urls: Sequence[str], prefixes: Sequence[str] | None, run: str | None
) -> dict[str, list[str] | None]:
    """Return the databases that are concerned, with the ids that each is asked for.

    Raises `store.errors.StoreError` for an id that is not in exactly one, `errors.UsageError` for a run that is in none.
    """
    from store.errors import StoreError

    shares: dict[str, list[str] | None] = {}
    if prefixes:
        for prefix in prefixes:
            url, rollout_id = await holder_of(urls, prefix)
            shares[url] = [*(shares.get(url) or ()), rollout_id]
        return shares
    for url in urls:
        try:
            ((_, found),) = await of_each([url], lambda history: history.overview(run_id=run, limit=1))
            is_concerned = run is None or bool(found)
        except StoreError:  # said when its turn comes
            is_concerned = True
        if is_concerned:
            shares[url] = None
    if not shares:
        raise errors.UsageError(f"there is no run {run!r}", hint="see `rollouts list`")
    return shares


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """The command's arguments."""

    run: str | None
    user: str | None
    """Whose rollouts; None stands for everybody's."""
    wait: bool
    concurrency: int
    allow_no_isolation: bool


class _Done(NamedTuple):
    """What came of one database: the exit code, and the lines to print."""

    code: int
    rows: list[Row]


async def _resume(url: str, ids: list[str] | None, asked: _Asked) -> _Done:
    from orchestrator import assembly

    worker = await assembly.Worker.start_existing(url)
    try:
        items = await _planned(worker.store, ids, asked)
        if not items:
            return _Done(0, [])
        _say_the_plan(items)
        taken = [
            item for item in items if not item.blocked or (asked.wait and item.is_held and not item.trouble)
        ]
        walked, code = await _work(worker, asked, taken)
        rows = await _results(worker.store, walked)
        if code == INTERRUPTED:
            say("stopped; the same command continues")
        return _Done(max(code, exit_code(rows, items)), rows)
    finally:
        await worker.stop()


async def _only_plan(url: str, ids: list[str] | None, asked: _Asked) -> _Done:
    """Return what `_resume` would do, and change nothing."""
    from orchestrator import assembly

    store = await assembly.look_at(url)
    try:
        items = await _planned(store, ids, asked)
        _say_what_is_left(items)
        return _Done(0, [_shown(item) for item in items])
    finally:
        await store.close()


def exit_code(rows: Sequence[Row], items: Sequence[Item]) -> int:
    """Return 0 when every rollout is over with a reward (`rows`: what came of those taken up) and none had to be left."""
    short = any(row["reward"] is None or row["now"] not in TERMINAL for row in rows)
    return int(short or any(item.blocked and not item.is_held for item in items))


async def _nothing(store: Look, asked: _Asked) -> str:
    """Say why there is nothing to do; raises `errors.UsageError` for a run that does not exist."""
    if asked.run is not None and not await store.history.overview(run_id=asked.run, limit=1):
        raise errors.UsageError(f"there is no run {asked.run!r}", hint="see `rollouts list`")
    others = len(await store.history.unfinished())
    if asked.user is not None and others:
        return f"nothing of yours to resume; {others} unfinished rollouts are somebody else's: --all takes them too"
    return "nothing to resume"


async def _standing(store: Look, rollout_id: str, run: str | None) -> str:
    from orchestrator import rollout

    row = await store.history.rollout(rollout_id)
    if row is not None and run is not None and row["run_id"] != run:
        return f"rollout {rollout_id} is not of run {run!r} but of {row['run_id']!r}"
    ending = await rollout.answer(store, rollout_id)
    what = f"reward {ending.reward}" if ending.reward is not None else ending.failure_class or "no reward"
    return f"rollout {rollout_id} is {ending.state.value} already: {what}"


def _say_the_plan(items: Sequence[Item]) -> None:
    for item in items:
        if not item.blocked:
            say(f"{_named(item)}: {item.action}")
    _say_what_is_left(items)


def _say_what_is_left(items: Sequence[Item]) -> None:
    for item in items:
        if item.blocked and not item.is_held:
            say(f"left: {_named(item)}: {item.blocked}")
    held = [item.row["lease_owner"] for item in items if item.is_held]
    if held:
        say(f"left: {len(held)} rollouts that live workers have ({', '.join(sorted(set(held))[:3])})")


def _named(item: Item) -> str:
    return f"{item.row['id']} ({item.row['instance_id']}, {item.row['state']})"


def _shown(item: Item) -> Row:
    row = item.row
    return {
        "id": row["id"], "instance_id": row["instance_id"], "state": row["state"], "action": item.action,
        "blocked": item.blocked,
    }  # fmt: skip


async def _planned(store: Look, prefixes: list[str] | None, asked: _Asked) -> list[Item]:
    """Plan for what is asked for; say why there is nothing to do, with all of it or with a rollout that was named."""
    from orchestrator.cli import plan

    ids = None if prefixes is None else {await store.history.find(prefix) for prefix in prefixes}
    items = await plan.make(store, ids=ids, run=asked.run, user=asked.user)
    for rollout_id in sorted((ids or set()) - {item.row["id"] for item in items}):
        say(await _standing(store, rollout_id, asked.run))
    if not items and ids is None:
        say(await _nothing(store, asked))
    return items


async def _work(worker: Worker, asked: _Asked, items: Sequence[Item]) -> tuple[list[Item], int]:
    """Walk them, those that want the same kind of sandbox together; return those that were, and the exit code so far.

    Those of a kind that cannot be made here are left, which is code 1; so are those that another process took up first.
    """
    from contextlib import AsyncExitStack

    from orchestrator.cli.batch import Batch
    from orchestrator.cli.chains import Chains
    from orchestrator.cli.progress import Progress

    groups: dict[str, list[Item]] = {}
    for item in items:
        if item.given is not None:
            groups.setdefault(item.given.settings.sandbox.model_dump_json(), []).append(item)
    walked: list[Item] = []
    async with AsyncExitStack() as stack:
        opened = [
            (group, provider) for group in groups.values() if (provider := await _provider(group, asked))
        ]
        for _, provider in opened:
            stack.push_async_callback(provider.close)
        able = [item for group, _ in opened for item in group]
        code = int(len(opened) < len(groups))
        say(f"{len(able)} unfinished rollouts are taken up, {asked.concurrency} at a time")
        await worker.store.take_from_dead([item.row["id"] for item in able])
        endpoint_of = await _endpoints(stack, able)
        for group, provider in opened:
            progress = Progress("resume")
            progress.know({item.row["id"]: item.row["state"] for item in group})
            runtime = worker.runtime(provider, endpoint_of, serves_sessions=False, on_move=progress.moved)
            batch = Batch(
                runtime, None, [item.row["id"] for item in group], concurrency=asked.concurrency,
                progress=progress, chains=Chains([], [], retries=0), wait=asked.wait,
            )  # fmt: skip
            async with progress:
                await batch.work()
            walked += [item for item in group if item.row["id"] not in batch.left]
            if batch.interrupted:
                return walked, INTERRUPTED
        return walked, code


async def _provider(group: Sequence[Item], asked: _Asked) -> SandboxProvider | None:
    """Return what makes the sandboxes of a group; without it, say that the group is left, and why."""
    from orchestrator.cli.preparation import open_provider

    given = group[0].given
    assert given is not None  # noqa: S101 - by how groups are made
    box = given.settings.sandbox
    allowed = box.allow_no_isolation or asked.allow_no_isolation
    sandbox = box.model_copy(update={"allow_no_isolation": allowed})
    try:
        return await open_provider(given.settings.model_copy(update={"sandbox": sandbox}))
    except errors.RolloutsError as e:
        for item in group:
            say(f"left: {_named(item)}: {e}" + (f" ({e.hint})" if e.hint else ""))
        return None


async def _endpoints(stack: AsyncExitStack, items: Sequence[Item]) -> EndpointOf:
    """Serve the recorded turns that are wanted; everything else is asked at its own endpoint."""
    from orchestrator.cli import endpoints
    from orchestrator.rollout import part_of

    served = {
        str(path): await stack.enter_async_context(endpoints.recorded(path))
        for path in {item.replay for item in items if item.needs_a_model and item.replay is not None}
    }

    def endpoint_of(row: Record, settings: Settings) -> Endpoint:
        path = part_of(row, "origin").get("replay")
        return served.get(path or "", endpoints.stored_endpoint)(row, settings)

    return endpoint_of


async def _results(store: Store, items: Sequence[Item]) -> list[Row]:
    from orchestrator import rollout

    rows: list[Row] = []
    for item in items:
        ending = await rollout.answer(store, item.row["id"])
        rows.append({
            "id": item.row["id"], "instance_id": item.row["instance_id"], "was": item.row["state"],
            "now": ending.state.value, "reward": ending.reward,
            "outcome": (ending.stats or {}).get("grade_outcome") or ending.failure_class, "message": ending.message,
        })  # fmt: skip
    return rows
