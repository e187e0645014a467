"""Crashed `graded` rollouts, taken over and released by the driver; the writer thread's own clock says what it cost."""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import threading
import time
import uuid
from dataclasses import dataclass, replace
from pathlib import Path

from bench import gates
from bench.gates import Gate
from bench.store_rounds import workload
from orchestrator import assembly, identity, rollout, settings
from orchestrator.rollout import Request
from orchestrator.sandbox.local import LocalProvider
from orchestrator.tasks.source import load_tasks
from store import rows, workers
from store.rollouts import Store

ROOT = Path(__file__).resolve().parents[1]
TASK = ROOT / "examples" / "tasks" / "offline__wordcount-1"
COUNTS = (250, 500, 1000)
AT_ONCE = 64
MOVES = ("provision", "start_agent", "take_patch", "grade")
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed:
    """One round."""

    count: int
    writer_s: float
    """CPU seconds of the thread that writes."""
    wall_s: float


def _writer_s() -> float:
    """Return the CPU seconds of the living writer threads, whoever started them."""
    ids = [thread.native_id for thread in threading.enumerate() if thread.name == "store-writer"]
    spent = 0
    for thread_id in ids:
        text = Path(f"/proc/self/task/{thread_id}/stat").read_text(encoding="ascii")
        spent += sum(int(field) for field in text.rpartition(")")[2].split()[11:13])
    return spent / _TICKS


def _evidence(rollout_id: str, trigger: str, key: str) -> list[rows.Row]:
    """Return what rides on a move in a rollout's life, its one sandbox closed before the grade as the driver does."""
    document = rows.Artifact.of(b"{}")
    match trigger:
        case "provision":
            return [rows.SandboxLive(key=key, provider_ids=[key], isolation="bwrap")]
        case "take_patch":
            patch = rows.PatchRow(
                artifact=rows.Artifact.of(b"diff"),
                base_commit="base",
                exit_reason="submitted",
                exit_message="",
            )
            return [patch, rows.SandboxReleasing(key=key)]
        case "grade":
            return [
                rows.GradeRow(
                    grade_id=f"grade-{rollout_id}", patch_sha256="0", grader_digest="0", grader="eval",
                    grader_version="1", reason="first", outcome="resolved", verdict=True, reward=1.0,
                    mask_sample=False, evidence="junit", f2p_pass=1, f2p_total=1, p2p_pass=1, p2p_total=1,
                    test_map=document, log=document, exit_code=0, task_sha256="0", eval_sha256="0",
                    isolation="bwrap", sandbox_key=key, flags=[], duration_s=1.0, error_class=None, error_text=None,
                ),
                rows.RewardRow(
                    grade_id=f"grade-{rollout_id}", reward=1.0, invalid_reason=None, reward_fn_version="resolved@1",
                    outcome_table=1, stats={"resolved": 1},
                ),
            ]  # fmt: skip
        case _:
            return []


async def _grade(store: Store, lease: rows.Lease, ref: str) -> None:
    key = identity.sandbox_key(store.uuid, lease.rollout_id, lease.fence, 1)
    intent = rows.SandboxIntent(
        key=key, role="task", provider="local", provider_ref=ref, env_name=None, ttl_s=60, create_timeout_s=60
    )
    await store.record(lease, [intent])
    for version, trigger in enumerate(MOVES):
        await store.transition(
            replace(lease, version=version),
            trigger,
            op_id=f"{lease.rollout_id}-{trigger}",
            extra=_evidence(lease.rollout_id, trigger, key),
        )
        if trigger == "take_patch":
            await store.close_sandbox(key, "removed")


async def _crashed(url: str, count: int, ref: str) -> None:
    """Leave `count` graded rollouts behind, held by a worker that is no process any more."""
    gone = replace(workers.this_process(str(uuid.uuid4())), pid=2**22 - 1)
    store = await Store.open(url, worker=gone, edges=workload.EDGES, new_uuid=str(uuid.uuid4()))
    (task,) = load_tasks(TASK, cache_dir=settings.cache_dir()).tasks
    chosen = settings.load("train", environ={})
    with_store = assembly.Worker(store=store, heartbeat=None)  # type: ignore[arg-type] # nothing is walked with it
    provider = LocalProvider(settings.SandboxSettings(), cache_dir=settings.cache_dir())
    runtime = with_store.runtime(provider, lambda _row, _settings: None)  # type: ignore[arg-type,return-value]
    requests = [Request(task=task, settings=chosen, run_id="bench", sample=n) for n in range(count)]
    await rollout.submit(runtime, requests)
    leases = await store.claim(limit=count)
    await asyncio.gather(*(_grade(store, lease, ref) for lease in leases))
    await store._writer.close()  # as a kill leaves it: nothing says that this worker stopped
    await store.history.close()


async def _resume(url: str, provider: LocalProvider, count: int) -> Resumed:
    async with assembly.working(url) as worker:
        runtime = worker.runtime(provider, lambda _row, _settings: None)  # type: ignore[arg-type,return-value]
        places = asyncio.Semaphore(AT_ONCE)

        async def one(lease: rows.Lease) -> rollout.Ending:
            async with places:
                return await rollout.advance(runtime, lease)

        spent, started = _writer_s(), time.perf_counter()
        await worker.store.take_from_dead()
        leases = await worker.store.claim(limit=count)
        endings = await asyncio.gather(*(one(lease) for lease in leases))
        done = Resumed(count=count, writer_s=_writer_s() - spent, wall_s=time.perf_counter() - started)
    wrong = [e for e in endings if (e.state.value, e.reward) != ("released", 1.0)]
    if wrong or len(endings) != count:
        raise RuntimeError(f"{len(endings)} of {count} resumed, {len(wrong)} wrongly: {wrong[:1]}")
    return done


async def _round(folder: Path, counts: tuple[int, ...]) -> list[Resumed]:
    chosen = settings.SandboxSettings(root=folder / "boxes", allow_no_isolation=True)
    provider = LocalProvider(chosen, cache_dir=settings.cache_dir())
    await provider.preflight()
    found = []
    for count in counts:
        url = f"sqlite:///{folder / f'{count}.db'}"
        await _crashed(url, count, provider.ref)
        found.append(await _resume(url, provider, count))
    return found


def main() -> int:
    """Run the benchmark; return 1 when a gate is missed."""
    parser = argparse.ArgumentParser(description="The database's part in resuming graded rollouts.")
    parser.add_argument(
        "--quick", action="store_true", help="few rollouts, once: shows that it runs, proves nothing"
    )
    parser.add_argument("--json", action="store_true", help="one object per gate and line")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    counts = (25, 50, 100) if asked.quick else COUNTS
    rounds = 1 if asked.quick else asked.rounds
    gates.RESULTS.mkdir(exist_ok=True)
    taken: list[list[Resumed]] = []
    for _ in range(rounds):
        print(f"resume: load {os.getloadavg()[0]:.1f}", file=sys.stderr)
        with tempfile.TemporaryDirectory(prefix="bench-", dir=gates.RESULTS) as folder:
            taken.append(asyncio.run(_round(Path(folder), counts)))
    writer_s = [statistics.median(one[n].writer_s for one in taken) for n in range(len(counts))]
    detail = {
        f"{count} rollouts, s": [round(one[n].writer_s, 2) for one in taken] for n, count in enumerate(counts)
    } | {"wall of the last, s": round(statistics.median(one[-1].wall_s for one in taken), 1)}
    each = [spent / count for spent, count in zip(writer_s, counts, strict=True)]
    found = [
        Gate(gate="resume.database_s", value=writer_s[-1], op="<=", target=2.0, rounds=rounds, detail=detail),
        Gate(gate="resume.each_of_many_vs_few", value=each[-1] / each[0], op="<=", target=1.5, rounds=rounds),
    ]  # fmt: skip
    gates.show(found, as_json=asked.json)
    gates.keep("resume-quick" if asked.quick else "resume", found)
    return int(not all(gate.ok for gate in found))
