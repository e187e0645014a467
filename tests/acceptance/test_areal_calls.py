"""A training run with everything going wrong: no failure has a reward, every reward can be recomputed, nothing leaks.

`ROLLOUTS_AREAL_CALLS=1000 pytest -s tests/acceptance/test_areal_calls.py -m long` makes so many calls;
`ROLLOUTS_AREAL_SEED` repeats the choices of an earlier run.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import sqlite3
import sys
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator import assembly, errors, provenance, recovery, settings
from orchestrator.sandbox import registry
from orchestrator.testing.areal_proxy import FakeProxy
from orchestrator.testing.replay import load_replay, parse_replay
from store.history import History

if TYPE_CHECKING:
    from orchestrator.testing.replay import Script

ROOT = Path(__file__).resolve().parents[2]
TASK = ROOT / "examples" / "tasks" / "offline__wordcount-1"
CALLS = int(os.environ.get("ROLLOUTS_AREAL_CALLS", "120"))
SEED = int(os.environ.get("ROLLOUTS_AREAL_SEED") or random.randrange(1 << 31))
KILL_EVERY = 30
"""Answers after which the worker is killed, about."""
FAULT_RATE = "0.08"
REWARDS = {"solved": 1.0, "wrong": 0.0, "idle": 0.0, "overflow": 1.0}
"""What a call whose model behaves so must be handed, if it is handed a number."""
KINDS = ("solved", "solved", "wrong", "idle", "overflow", "down", "401", "410", "500", "drop", "cancelled")


def script() -> Script:
    """What the model does in each kind of call."""
    own = load_replay(ROOT / "examples" / "replay.yaml").scenarios["offline__wordcount-1"]
    turns = [[turn.model_dump(exclude_none=True) for turn in scenario.turns] for scenario in own]
    faults: dict[str, dict[str, Any]] = {
        "401": {"status": 401, "body": "{}"}, "410": {"status": 410, "body": "{}"},
        "500": {"status": 500, "body": '{"detail": "ValueError: ?"}'}, "drop": {"drop": True},
        "cancelled": {"delay_s": 600.0},
        "overflow": {
            "status": 500, "body": '{"detail": "len of prompt tokens 441 exceeds max_total_tokens 200"}',
            "headers": {"content-type": "application/json"},
        },
    }  # fmt: skip
    told = {"solved": turns[0], "wrong": turns[1], "idle": turns[2], "down": turns[0]}
    told |= {name: [*turns[0][:-1], {"fault": fault}] for name, fault in faults.items()}
    return parse_replay({name: [{"name": name, "turns": what}] for name, what in told.items()})


def record() -> dict[str, Any]:
    return {
        "instance_id": "offline__wordcount-1", "dataset_kind": "local", "repo": "example/wordcount",
        "repo_path": str(TASK / "repo"), "workdir": "/testbed", "strict": True, "targets": ["tests"],
        "problem_statement": (TASK / "problem_statement.md").read_text(),
        "test_patch": (TASK / "test.patch").read_text(), **json.loads((TASK / "tests.json").read_text()),
    }  # fmt: skip


@dataclass
class Run:
    """The trainer's side."""

    folder: Path
    proxy: FakeProxy
    choices: random.Random
    down: str
    """An address where nobody answers."""
    orders: dict[int, dict[str, Any]] = field(default_factory=dict)
    kinds: dict[int, str] = field(default_factory=dict)
    answers: dict[int, dict[str, Any]] = field(default_factory=dict)
    kills: int = 0

    @property
    def url(self) -> str:
        return f"sqlite:///{self.folder / 'rollouts.db'}"

    def order(self) -> None:
        """Draw one more prompt, with a session of its own."""
        number = len(self.orders)
        kind = self.choices.choice(KINDS)
        self.kinds[number] = kind
        self.orders[number] = {
            "n": number,
            "record": record(),
            "cancel_after_s": self.choices.uniform(0.2, 4) if kind == "cancelled" else None,
            "arguments": {
                "agent_type": "swe", "agent_config": str(self.folder / "config.yaml"), "result_dir": str(self.folder / "logs"),
                "override_api_key": self.proxy.session(kind),
                "override_base_url": self.down if kind == "down" else self.proxy.base_url,
            },
        }  # fmt: skip

    async def work(self, numbers: list[int], kill_after: int | None) -> None:
        """Let a worker make these calls, and kill it after so many answers."""
        with (self.folder / "words").open("ab") as words:
            worker = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "tests.acceptance.areal_caller", str(self.choices.randrange(1 << 30)), FAULT_RATE,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=words, limit=1 << 24, cwd=ROOT,
                env={**os.environ, "ROLLOUTS_DATABASE_URL": self.url, "PYTHONPATH": str(ROOT)},
            )  # fmt: skip
        assert worker.stdin is not None
        assert worker.stdout is not None
        worker.stdin.write("".join(json.dumps(self.orders[n]) + "\n" for n in numbers).encode())
        worker.stdin.close()
        heard = 0
        while line := await worker.stdout.readline():
            said = json.loads(line)
            self.answers[said.pop("n")] = said
            heard += 1
            if heard == kill_after:
                worker.kill()
                self.kills += 1
        code = await worker.wait()
        assert code == (-9 if heard >= (kill_after or heard + 1) else 0), (self.folder / "words").read_text()[
            -3000:
        ]


@pytest.mark.long
@pytest.mark.timeout(600 + 6 * CALLS)
async def test_a_training_run_full_of_faults_rewards_none_of_them_and_loses_nothing(tmp_path: Path):
    (tmp_path / "config.yaml").write_text(
        "extends: train\nllm: {connect_retries: 0, request_timeout_s: 30}\nretry: {backoff_base_s: 0}\n"
        f"sandbox: {{root: {tmp_path / 'boxes'}}}\n"
    )
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        async with FakeProxy(script()) as proxy:
            run = Run(tmp_path, proxy, random.Random(SEED), f"http://127.0.0.1:{closed.getsockname()[1]}")
            for _ in range(CALLS):
                run.order()
            waiting = sorted(run.orders)
            while waiting:
                batch, waiting = waiting[: 2 * KILL_EVERY], waiting[2 * KILL_EVERY :]
                kill_after = run.choices.randrange(KILL_EVERY // 2, KILL_EVERY) if waiting else None
                await run.work(batch, kill_after)
                if (
                    kill_after is not None
                ):  # the trainer never hears of what its dead worker did, and draws anew
                    lost = [n for n in batch if n not in run.answers]
                    first = len(run.orders)
                    for _ in lost:
                        run.order()
                    waiting += range(first, len(run.orders))
    await heal(run)
    cleaned = await assembly.clean(run.url)
    assert cleaned.clean, cleaned
    await judge(run)


async def heal(run: Run) -> None:
    """Do what the next worker does before anything else."""
    chosen = settings.load(str(run.folder / "config.yaml")).sandbox
    provider = registry.make(chosen, cache_dir=settings.cache_dir())
    await provider.preflight()

    def nobody(row: Any, _settings: Any) -> Any:
        raise AssertionError(f"rollout {row['id']} asks for its session again")

    async with assembly.working(run.url) as worker:
        await recovery.heal(worker.runtime(provider, nobody, serves_sessions=False))
    await provider.close()


async def judge(run: Run) -> None:
    """Hold what was handed out against the rows, and the rows against each other."""
    with closing(sqlite3.connect(run.folder / "rollouts.db")) as database:

        def ask(sql: str) -> list[tuple[Any, ...]]:
            return database.execute(sql).fetchall()

        handed = Counter(
            "exception" if "cancelled" in said else "none" if said["reward"] is None else "value"
            for said in run.answers.values()
        )
        delivered = Counter(dict(ask("select kind, count(*) from deliveries group by 1")))
        classes = dict(ask("select failure_class, count(*) from rollouts where state = 'failed' group by 1"))
        sys.stdout.write(
            f"{len(run.answers)} calls answered, {run.kills} workers killed, seed {SEED}: handed {dict(handed)}, "
            f"delivered {dict(delivered)}, failed {classes}\n"
        )
        for number, said in run.answers.items():
            if said.get("reward") is not None:
                assert said["reward"] == REWARDS[run.kinds[number]], (number, run.kinds[number], said)
        assert len(run.answers) >= CALLS * 0.6
        # what was cancelled before its rollout existed has none to be written down for
        missing = {kind: n for kind, n in (handed - delivered).items() if kind != "exception"}
        assert not missing, "handed out and not written down"
        # a worker may die between the row and the caller's hearing of it
        assert sum((delivered - handed).values()) <= run.kills * 12
        unfinished = ask("select id, state from rollouts where state not in ('released', 'failed')")
        assert unfinished == []
        assert ask(
            "select count(*) from rewards join rollouts on id = rollout_id where state = 'failed'"
        ) == [(0,)]
        assert ask("select count(*) from sandboxes where status not in ('released', 'lost')") == [(0,)]
        assert ask("select count(*) from sandbox_leaks") == [(0,)]
        assert (
            ask("select rollout_id from deliveries where kind = 'value' group by 1 having count(*) > 1") == []
        )
        assert ask("select count(*) from deliveries_v where kind = 'value' and value <> stored_reward") == [
            (0,)
        ]
        rewards = ask("select rollout_id, grade_id, reward, stats from rewards")
    history = History.of(run.url)
    try:
        for rollout_id, grade_id, reward, stats in rewards:
            facts = await provenance.gather(history, rollout_id, grade_id)
            assert provenance.stats_of(facts) == json.loads(stats)
            outcome = errors.GradeOutcome(facts.grade["outcome"])
            assert provenance.reward_of(outcome, masked=bool(facts.grade["mask_sample"])) == reward
    finally:
        await history.close()
    assert rewards, "nothing to check"
