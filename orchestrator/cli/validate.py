"""`rollouts validate`: is a task worth running? Its gold patch must solve it, and a patch that does nothing must not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli import render
from orchestrator.cli.console import say
from orchestrator.cli.edge import database_url, run_async
from orchestrator.cli.options import AllowNoIsolation, Config, Csv, Db, Json, Set, Tasks

if TYPE_CHECKING:
    from pathlib import Path

    from orchestrator.settings import Settings

_COLUMNS = tuple(render.Column(name) for name in ("instance_id", "noop", "gold", "ok", "reasons"))


def validate(
    tasks: Tasks,
    runs: Annotated[int, typer.Option("-n", "--runs", min=1, help="Runs of each patch; more than one finds flaky tests.")] = 1,
    concurrency: Annotated[int, typer.Option("-j", "--concurrency", min=1, help="Tasks at a time.")] = 2,
    config: Config = "train",
    db: Db = None,
    allow_no_isolation: AllowNoIsolation = False,
    changes: Set = None,
    as_json: Json = False,
    as_csv: Csv = False,
) -> None:  # fmt: skip
    """Grade each task's gold patch and a patch that changes nothing, in fresh local sandboxes.

    Every verdict is stored. Exit code 1: a record was refused, or a task is not as it should be.
    """
    from orchestrator.cli import preparation
    from orchestrator.settings import load

    arguments = preparation.parsed_changes(changes or [])
    arguments["sandbox.allow_no_isolation"] = allow_no_isolation or None
    settings = load(config, arguments=arguments)
    rows, refused = run_async(_examine_all(tasks, settings, runs, concurrency, database_url(db)))
    render.emit(rows, _COLUMNS, render.form_of(as_json=as_json, as_csv=as_csv))
    bad = sum(not row["ok"] for row in rows)
    say(f"{len(rows) - bad} of {len(rows) + refused} tasks are as they should be")
    raise typer.Exit(1 if bad or refused else 0)


async def _examine_all(
    path: Path, settings: Settings, runs: int, concurrency: int, database: str
) -> tuple[list[dict[str, Any]], int]:
    import asyncio
    from contextlib import AsyncExitStack

    from orchestrator import assembly
    from orchestrator.cli import control_runs, preparation
    from orchestrator.rollout import custody

    loaded = await preparation.load(path)
    if not loaded.tasks:
        return [], len(loaded.refused)
    provider = await preparation.open_provider(settings)
    turn = asyncio.Semaphore(concurrency)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(provider.close)
        worker = await stack.enter_async_context(assembly.working(database))
        bench = control_runs.Bench(store=worker.store, provider=provider, settings=settings, runs=runs)
        swept = await custody.sweep_abandoned(worker.store, provider)
        if swept:
            say(f"removed {swept} sandboxes of validations that did not live to do it")

        async def examine(index: int) -> dict[str, Any]:
            task = loaded.tasks[index]
            async with turn:
                found = await control_runs.examine(task, bench)
            say(f"{task.instance_id}: {'ok' if not found.reasons else 'NOT ok'}")
            return found.row(task)

        async with asyncio.TaskGroup() as group:
            examined = [group.create_task(examine(index)) for index in range(len(loaded.tasks))]
    return [task.result() for task in examined], len(loaded.refused)
