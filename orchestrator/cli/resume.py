"""`rollouts resume`: go on with what dead workers left, each rollout from where it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator import errors, identity
from orchestrator.cli import render
from orchestrator.cli.console import say
from orchestrator.cli.edge import INTERRUPTED, database_urls, of_the_one_with, run_async
from orchestrator.cli.options import AllowNoIsolation, Csv, Dbs, Json
from orchestrator.states import TERMINAL

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AsyncExitStack

    from orchestrator.agents.base import Endpoint
    from orchestrator.assembly import Worker
    from orchestrator.cli.endpoints import EndpointOf
    from orchestrator.cli.plan import Item
    from orchestrator.settings import Settings
    from store.history import History, Record
    from store.look import Look
    from store.rollouts import Store

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
    user = None if ids or run or every else identity.user()
    urls = database_urls(db)
    if len(urls) > 1:
        ids = [run_async(of_the_one_with(urls, prefix, _the_id)) for prefix in ids or ()]
    asked = _Asked(
        ids=ids or None,
        several=len(urls) > 1,
        run=run,
        user=user,
        wait=wait,
        concurrency=concurrency,
        allow_no_isolation=allow_no_isolation,
        form=form,
    )
    code = 0
    for url in urls:
        try:
            code = max(code, run_async((_only_plan if dry_run else _resume)(url, asked)))
        except errors.NothingKnown as e:
            if len(urls) == 1:
                raise
            say(f"{e}; {e.hint}")
            code = max(code, 1)
        if code == INTERRUPTED:
            break
    raise typer.Exit(code)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """The command's arguments."""

    ids: list[str] | None
    several: bool
    """More databases than one are asked; `ids` are whole then, each in one of them."""
    run: str | None
    user: str | None
    """Whose rollouts; None stands for everybody's."""
    wait: bool
    concurrency: int
    allow_no_isolation: bool
    form: render.Form


async def _resume(url: str, asked: _Asked) -> int:
    from orchestrator import assembly

    worker = await assembly.Worker.start_existing(url)
    try:
        items = await _planned(worker.store, asked)
        taken = [
            item for item in items if not item.blocked or (asked.wait and item.is_held and not item.trouble)
        ]
        if not items:
            return 0
        _say_the_plan(items)
        say(f"{len(taken)} of {len(items)} unfinished rollouts are taken up, {asked.concurrency} at a time")
        interrupted = await _work(worker, asked, taken)
        rows = await _results(worker.store, taken)
        render.emit(rows, _RESULT, asked.form)
        if interrupted:
            say("stopped; the same command continues")
            return INTERRUPTED
        return exit_code(rows, items)
    finally:
        await worker.stop()


async def _only_plan(url: str, asked: _Asked) -> int:
    """Show what `_resume` would do, and change nothing."""
    from orchestrator import assembly

    store = await assembly.look_at(url)
    try:
        items = await _planned(store, asked)
        if items:
            render.emit([_shown(item) for item in items], _PLAN, asked.form)
            _say_what_is_left(items)
        return 0
    finally:
        await store.close()


def exit_code(rows: Sequence[Mapping[str, object]], items: Sequence[Item]) -> int:
    """Return 0 when every rollout is over with a reward (`rows`: what came of those taken up) and none had to be left."""
    short = any(row["reward"] is None or row["now"] not in TERMINAL for row in rows)
    return int(short or any(item.blocked and not item.is_held for item in items))


async def _nothing(store: Look, asked: _Asked) -> str:
    """Say why there is nothing to do; raises `errors.UsageError` for a run that does not exist."""
    if asked.ids is not None:
        return (
            "; ".join([await _standing(store, prefix, asked.run) for prefix in asked.ids])
            or "nothing to resume"
        )
    if asked.run is not None and not await store.history.overview(run_id=asked.run, limit=1):
        raise errors.UsageError(f"there is no run {asked.run!r}", hint="see `rollouts list`")
    others = len(await store.history.unfinished())
    if asked.user is not None and others:
        return f"nothing of yours to resume; {others} unfinished rollouts are somebody else's: --all takes them too"
    return "nothing to resume"


async def _standing(store: Look, prefix: str, run: str | None) -> str:
    from orchestrator import rollout

    rollout_id = await store.history.find(prefix)
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


def _shown(item: Item) -> dict[str, object]:
    row = item.row
    return {
        "id": row["id"], "instance_id": row["instance_id"], "state": row["state"], "action": item.action,
        "blocked": item.blocked,
    }  # fmt: skip


async def _the_id(_history: History, rollout_id: str) -> str:
    return rollout_id


async def _planned(store: Look, asked: _Asked) -> list[Item]:
    """Plan for what is asked for; where that is nothing, say why."""
    from orchestrator.cli import plan

    ids = None
    if asked.ids is not None:
        ids = set(asked.ids) if asked.several else {await store.history.find(p) for p in asked.ids}
    items = await plan.make(store, ids=ids, run=asked.run, user=asked.user)
    if not items:
        say(await _nothing(store, asked))
    return items


async def _work(worker: Worker, asked: _Asked, items: Sequence[Item]) -> bool:
    """Walk them, those that want the same kind of sandbox together; say whether somebody said stop."""
    from contextlib import AsyncExitStack

    from orchestrator.cli.batch import Batch
    from orchestrator.cli.chains import Chains
    from orchestrator.cli.preparation import open_provider
    from orchestrator.cli.progress import Progress
    from orchestrator.settings import stored

    await worker.store.take_from_dead([item.row["id"] for item in items])
    groups: dict[str, tuple[Settings, list[Item]]] = {}
    for item in items:
        settings = item.settings or stored(item.row["input"]["settings"])
        groups.setdefault(settings.sandbox.model_dump_json(), (settings, []))[1].append(item)
    async with AsyncExitStack() as stack:
        endpoint_of = await _endpoints(stack, items)
        for settings, group in groups.values():
            allowed = settings.sandbox.allow_no_isolation or asked.allow_no_isolation
            box = settings.sandbox.model_copy(update={"allow_no_isolation": allowed})
            provider = await open_provider(settings.model_copy(update={"sandbox": box}))
            stack.push_async_callback(provider.close)
            progress = Progress("resume")
            progress.know({item.row["id"]: item.row["state"] for item in group})
            runtime = worker.runtime(provider, endpoint_of, serves_sessions=False, on_move=progress.moved)
            batch = Batch(
                runtime, None, [item.row["id"] for item in group], concurrency=asked.concurrency,
                progress=progress, chains=Chains([], [], retries=0),
            )  # fmt: skip
            async with progress:
                await batch.work()
            if batch.interrupted:
                return True
    return False


async def _endpoints(stack: AsyncExitStack, items: Sequence[Item]) -> EndpointOf:
    """Serve the recorded turns that are wanted; everything else is asked at its own endpoint."""
    from orchestrator.cli import endpoints

    served = {
        str(path): await stack.enter_async_context(endpoints.recorded(path))
        for path in {item.replay for item in items if item.needs_a_model and item.replay is not None}
    }

    def endpoint_of(row: Record, settings: Settings) -> Endpoint:
        path = row["input"].get("origin", {}).get("replay")
        return served.get(path, endpoints.stored_endpoint)(row, settings)

    return endpoint_of


async def _results(store: Store, items: Sequence[Item]) -> list[dict[str, object]]:
    from orchestrator import rollout

    rows: list[dict[str, object]] = []
    for item in items:
        ending = await rollout.answer(store, item.row["id"])
        rows.append({
            "id": item.row["id"], "instance_id": item.row["instance_id"], "was": item.row["state"],
            "now": ending.state.value, "reward": ending.reward,
            "outcome": (ending.stats or {}).get("grade_outcome") or ending.failure_class, "message": ending.message,
        })  # fmt: skip
    return rows
