"""One run from loaded settings to a summary: look at everything first, submit in one go, work, sum up."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator import assembly, errors, recovery
from orchestrator.agents.registry import AGENT_NAMES
from orchestrator.cli import causes, endpoints, naming, preparation, render, summary
from orchestrator.cli.batch import Batch
from orchestrator.cli.chains import Chains
from orchestrator.cli.console import say
from orchestrator.cli.progress import Progress
from orchestrator.rollout import Request
from orchestrator.sandbox import registry
from orchestrator.states import TERMINAL

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from orchestrator.assembly import Worker
    from orchestrator.settings import Settings
    from orchestrator.tasks.record import Task
    from store.history import Record
    from store.rollouts import Store


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """What a person asked for."""

    tasks: Path
    settings: Settings
    config: str
    samples: int
    concurrency: int
    run: str | None
    """The explicit name of the run."""
    retries: int
    """Successors that a sample gets at most when its rollouts fail."""
    database: str
    replay: Path | None = None
    """Recorded turns instead of a model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """How the run ended."""

    interrupted: bool
    all_well: bool
    """Every rollout has a reward and no record was refused."""


def check_names(agent: str | None, sandbox: str | None) -> None:
    """Raise `errors.ConfigError` for a kind of agent or sandbox that nobody knows."""
    for what, name, known in (("agent", agent, AGENT_NAMES), ("sandbox", sandbox, registry.PROVIDER_NAMES)):
        if name is not None and name not in known:
            raise errors.ConfigError(
                f"there is no {what} called {name!r}", hint=f"choose one of: {', '.join(known)}"
            )


async def conduct(order: Order) -> Result:
    """Carry the order out.

    Raises `errors.UsageError` before anything is submitted, or a `store.errors.StoreError`.
    """
    if order.replay is None:
        endpoints.check_named(order.settings)
    loaded = await preparation.load(order.tasks)
    if not loaded.tasks:
        raise errors.TaskFileError(f"no task of {order.tasks} can be run", hint="the refusals above say why")
    tasks = _without_repeats(loaded.tasks)
    async with assembly.working(order.database) as worker:
        store = worker.store
        run_id = await _run_name(order, store)
        origin = endpoints.origin(order.settings, order.replay)
        requests = [
            Request(task=task, settings=order.settings, run_id=run_id, sample=sample, origin=origin)
            for task in tasks
            for sample in range(order.samples)
        ]
        held = await store.history.overview(run_id=run_id)
        chains = Chains(requests, held, retries=order.retries)
        if order.run is not None and chains.is_over:
            ids, interrupted = chains.ids, False
            say(f"run {run_id} is finished; answering from the store")
        else:
            ids, interrupted = await _work(order, worker, run_id, tasks, chains)
        _tell_of_edits(await store.history.overview(run_id=run_id), tasks)
        rows = await _rows(store, run_id, ids)
        render.emit(summary.by_instance(rows), summary.COLUMNS, render.form_of(as_json=False, as_csv=False))
        await causes.tell(store.history, run_id, rows)
    all_rewarded = all(row["reward"] is not None for row in rows)
    if loaded.refused:
        say(f"{len(loaded.refused)} task records were refused, see above")
    return Result(interrupted=interrupted, all_well=all_rewarded and not loaded.refused)


async def _work(
    order: Order, worker: Worker, run_id: str, tasks: Sequence[Task], chains: Chains
) -> tuple[list[str], bool]:
    """Look at sandboxes and model, submit, walk; return the ids that count and whether somebody said stop."""
    async with AsyncExitStack() as stack:
        provider = await preparation.open_provider(order.settings)
        stack.push_async_callback(provider.close)
        endpoint_of = await stack.enter_async_context(
            endpoints.opened(order.settings, order.replay, tasks, order.samples)
        )
        progress = Progress(run_id)
        runtime = worker.runtime(
            provider, endpoint_of, on_move=lambda i, state: progress.moved(chains.counted_as(i), state)
        )
        upkeep = worker.runtime(provider, endpoint_of, serves_sessions=False)
        await recovery.heal(upkeep)
        releasing = asyncio.create_task(recovery.keep_releasing(upkeep), name="keep-releasing")
        stack.callback(releasing.cancel)
        again = sum(request.parent_id is not None for request in chains.missing)
        await chains.submit(runtime, chains.missing)
        held = await worker.store.history.overview(run_id=run_id)
        chains.catch_up(held)
        others = _others(held, chains, order.settings)
        counted = {*chains.ids, *others}
        rows = [row for row in held if row["id"] in counted]
        progress.know({chains.counted_as(row["id"]): row["state"] for row in rows})
        left = [row["id"] for row in reversed(rows) if _is_to_do(row, chains)]
        tried = f" ({again} for samples that failed before)" if again else ""
        say(f"run {run_id}: {len(rows)} rollouts, {len(left)} to do{tried}, {order.concurrency} at a time")
        batch = Batch(runtime, run_id, left, concurrency=order.concurrency, progress=progress, chains=chains)
        async with progress:
            await batch.work()
        if batch.interrupted:
            say("stopped; the same command continues")
        digests = {task.sha256 for task in tasks}
        of_these = {row["id"] for row in held if row["task_sha256"] in digests}
        return [*chains.ids, *(i for i in others if i in of_these)], batch.interrupted


async def _run_name(order: Order, store: Store) -> str:
    if order.run is not None:
        return order.run
    name = naming.derived_name(order.tasks, order.settings, order.config)
    family = await store.history.run_family(name)
    newest = naming.newest_of(name, family)
    states = {} if newest is None else await store.history.run_states([newest[0]])
    chosen = naming.choose(name, family, states)
    if chosen.notice:
        say(chosen.notice)
    return chosen.name


def _tell_of_edits(held: Sequence[Record], tasks: Sequence[Task]) -> None:
    """Say that the run holds rollouts of tasks that were changed since: the totals are those of the tasks as they are."""
    names, digests = {task.instance_id for task in tasks}, {task.sha256 for task in tasks}
    old = [row for row in held if row["instance_id"] in names and row["task_sha256"] not in digests]
    if old:
        which = ", ".join(sorted({row["instance_id"] for row in old})[:3])
        say(
            f"{len(old)} rollouts of this run are of an earlier version of their task ({which}) and do not count here"
        )


def _without_repeats(tasks: Sequence[Task]) -> list[Task]:
    """Drop records that are equal to an earlier one: more samples are asked for with -n."""
    unique = {task.sha256: task for task in reversed(tasks)}
    kept = list(reversed(unique.values()))
    if len(kept) < len(tasks):
        say(f"warning: {len(tasks) - len(kept)} repeated records are run once; use -n for more samples")
    return kept


async def _rows(store: Store, run_id: str, ids: Sequence[str]) -> list[Record]:
    wanted = set(ids)
    return [row for row in await store.history.overview(run_id=run_id) if row["id"] in wanted]


def _others(held: Sequence[Record], chains: Chains, settings: Settings) -> list[str]:
    """Return unfinished rollouts of the run that an earlier command asked for with the same settings."""
    return [
        row["id"]
        for row in held
        if row["state"] not in TERMINAL and not chains.has(row) and row["config_sha256"] == settings.sha256
    ]


def _is_to_do(row: Record, chains: Chains) -> bool:
    """Say whether a rollout is unfinished, or failed in another process's hands so that its successor is due here."""
    return row["state"] not in TERMINAL or chains.successor(row["id"], row["failure_class"]) is not None
