"""`rollouts run`: tasks x samples become rollouts of one run, and this process works on them until they are over."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.edge import INTERRUPTED, database_url, run_async
from orchestrator.cli.options import AllowNoIsolation, Config, Db, Set, Tasks

_REPLAY = "replay:"


_BaseUrl = Annotated[
    str | None, typer.Option("--base-url", metavar="URL", help="OpenAI-compatible endpoint, often ending in /v1.")
]  # fmt: skip
_Model = Annotated[
    str | None, typer.Option("--model", metavar="NAME", help="Model to ask for; replay:FILE plays recorded turns.")
]  # fmt: skip
_Agent = Annotated[str | None, typer.Option("--agent", metavar="NAME", help="Kind of agent.")]
_Sandbox = Annotated[str | None, typer.Option("--sandbox", metavar="NAME", help="Where sandboxes are made.")]
_Samples = Annotated[int, typer.Option("-n", "--samples", min=1, help="Rollouts for each task.")]
_Concurrency = Annotated[int, typer.Option("-j", "--concurrency", min=1, help="Rollouts at a time.")]
_Run = Annotated[
    str | None,
    typer.Option("--run", metavar="NAME", help="Name of the run: attach to it; what is finished is answered."),
]  # fmt: skip
_Retries = Annotated[
    int,
    typer.Option("--retries", metavar="N", min=0, help="New rollouts for each sample that failed, at most; 0: none."),
]  # fmt: skip
_ApiKeyEnv = Annotated[
    str | None, typer.Option("--api-key-env", metavar="NAME", help="Variable with the key. Default: OPENAI_API_KEY.")
]  # fmt: skip


def run(
    tasks: Tasks,
    base_url: _BaseUrl = None,
    model: _Model = None,
    agent: _Agent = None,
    sandbox: _Sandbox = None,
    config: Config = "train",
    samples: _Samples = 1,
    concurrency: _Concurrency = 4,
    name: _Run = None,
    retries: _Retries = 1,
    db: Db = None,
    allow_no_isolation: AllowNoIsolation = False,
    api_key_env: _ApiKeyEnv = None,
    changes: Set = None,
) -> None:
    """Run an agent on each task, grade what it did, store every step.

    The same command again continues an unfinished run; when it is finished, it starts NAME.2 instead. With --run it
    runs what is missing from that run: further tasks or samples, and samples whose newest rollout failed. A failed
    sample gets a new rollout, --retries at most per call, unless its task is invalid or a person cancelled it during
    the call; only the newest rollout of a sample counts. Without --run, failed samples alone do not make a run
    unfinished. Ctrl-C once lets running rollouts finish, twice stops at once; both can be continued. Exit code 1: a
    rollout ended without a reward (failed or masked), or a task record was refused while the others ran.
    """
    from orchestrator.cli import conduct, endpoints, preparation
    from orchestrator.settings import load

    replay = Path(model.removeprefix(_REPLAY)) if model is not None and model.startswith(_REPLAY) else None
    conduct.check_names(agent, sandbox)
    arguments = {
        **preparation.parsed_changes(changes or []),
        "agent.type": agent,
        "sandbox.provider": sandbox,
        "sandbox.allow_no_isolation": allow_no_isolation or None,
        "llm.api_key_env": api_key_env,
        "llm.base_url": base_url,
        "llm.model": model,
    }
    if replay is not None:
        arguments |= endpoints.replay_settings(replay)
    order = conduct.Order(
        tasks=tasks,
        settings=load(config, arguments=arguments),
        config=config,
        samples=samples,
        concurrency=concurrency,
        run=name,
        retries=retries,
        database=database_url(db),
        replay=replay,
    )
    result = run_async(conduct.conduct(order))
    raise typer.Exit(INTERRUPTED if result.interrupted else int(not result.all_well))
