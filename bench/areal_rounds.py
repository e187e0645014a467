"""Many rollouts at once through AReaL's call, on one loop that is watched; the model and an idle loop are other processes.

Pauses are told twice: on the clock, where everything on the machine counts, and as time that the loop's own thread
computed within one callback, which is ours; the collector's share of that is told apart. The idle loop says what the machine alone does to a loop meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import asyncio.events
import contextlib
import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import gates
from bench.gates import Gate

ROOT = Path(__file__).resolve().parents[1]
TASK = ROOT / "examples" / "tasks" / "offline__wordcount-1"
AT_ONCE = 128
_TICK_S = 0.002


@dataclass
class Watchdog:
    """Measures every callback of the loop that it is started in, and keeps the stack of the worst."""

    longest_ms: float = 0.0
    """Computed by the loop's thread in one callback, garbage collections included."""
    own_ms: float = 0.0
    """The same without them."""
    paused_ms: float = 0.0
    """The longest callback on the clock."""
    stack: str = ""
    callbacks: int = 0
    collected_ms: float = 0.0
    """The longest garbage collection in the loop's thread: its length follows from everything the process has loaded."""
    _began: float = 0.0
    _collecting: float = 0.0
    _collected: float = 0.0
    _seen: str = ""
    _over: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Watch the running loop; a thread samples where a long callback is."""
        own, run = threading.get_ident(), asyncio.events.Handle._run

        def measured(handle: asyncio.Handle) -> None:
            if threading.get_ident() != own:
                return run(handle)
            self._began, cpu = time.perf_counter(), time.thread_time()
            self._seen, self._collected = "", 0.0
            try:
                return run(handle)
            finally:
                computed = (time.thread_time() - cpu) * 1000
                self.own_ms = max(self.own_ms, computed - self._collected * 1000)
                self.paused_ms = max(self.paused_ms, (time.perf_counter() - self._began) * 1000)
                self._began = 0.0
                self.callbacks += 1
                if computed > self.longest_ms:
                    self.longest_ms, self.stack = computed, self._seen or repr(handle)

        def collecting(phase: str, _info: dict[str, int]) -> None:
            if threading.get_ident() != own:
                return
            if phase == "start":
                self._collecting = time.thread_time()
            else:
                took = time.thread_time() - self._collecting
                self._collected += took
                self.collected_ms = max(self.collected_ms, took * 1000)

        gc.callbacks.append(collecting)
        asyncio.events.Handle._run = measured  # type: ignore[method-assign,assignment] # there is no other way to see each one
        threading.Thread(target=self._sample, args=(own,), daemon=True).start()

    def stop(self) -> None:
        """Stop sampling."""
        self._over.set()

    def _sample(self, loop_thread: int) -> None:
        while not self._over.wait(_TICK_S):
            began = self._began
            if began and time.perf_counter() - began > 0.01:
                frame = sys._current_frames().get(loop_thread)
                with contextlib.suppress(
                    AttributeError
                ):  # the loop went on, and the frame was put to other use
                    self._seen = "".join(traceback.format_stack(frame)[-6:])


def idle() -> None:
    """Be a loop that does nothing; at the end of standard input print its longest pause in milliseconds."""

    async def run() -> float:
        done = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
        longest = 0.0
        while not done.done():
            before = time.perf_counter()
            await asyncio.sleep(_TICK_S)
            longest = max(longest, time.perf_counter() - before - _TICK_S)
        return longest

    print(round(asyncio.run(run()) * 1000, 2))


def model() -> None:
    """Serve AReaL's proxy; print its address, then a key for each line of standard input."""
    from orchestrator.testing.areal_proxy import FakeProxy
    from orchestrator.testing.replay import load_replay

    async def run() -> None:
        async with FakeProxy(load_replay(ROOT / "examples" / "replay.yaml")) as proxy:
            print(proxy.base_url, flush=True)
            while line := await asyncio.to_thread(sys.stdin.readline):
                print(proxy.session("offline__wordcount-1", int(line)), flush=True)

    asyncio.run(run())


def _child(what: str) -> subprocess.Popen[str]:
    code = f"from bench import areal_rounds; areal_rounds.{what}()"
    return subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )


def _record() -> dict[str, Any]:
    return {
        "instance_id": "offline__wordcount-1", "dataset_kind": "local", "repo": "example/wordcount",
        "repo_path": str(TASK / "repo"), "workdir": "/testbed", "strict": True, "targets": ["tests"],
        "problem_statement": (TASK / "problem_statement.md").read_text(encoding="utf-8"),
        "test_patch": (TASK / "test.patch").read_text(encoding="utf-8"),
        **json.loads((TASK / "tests.json").read_text(encoding="utf-8")),
    }  # fmt: skip


async def _rollouts(count: int, base_url: str, keys: list[str], folder: Path) -> tuple[Watchdog, list[Any]]:
    from aweagent.lifecycle import run_agent_with_reward
    from orchestrator import entry

    config = folder / "bench.yaml"
    config.write_text("extends: train\nsandbox: {allow_no_isolation: true}\n", encoding="utf-8")
    record, places, dog = _record(), asyncio.Semaphore(AT_ONCE), Watchdog()

    async def one(key: str) -> float | None:
        async with places:
            reward, _ = await run_agent_with_reward(
                record,
                agent_type="swe",
                agent_config=str(config),
                result_dir=str(folder / "logs"),
                override_api_key=key,
                override_base_url=base_url,
            )
            return reward

    dog.start()
    rewards = await asyncio.gather(*(one(key) for key in keys[:count]))
    dog.stop()
    await entry.close()
    return dog, rewards


def main() -> int:
    """Run the benchmark; return 1 when the gate is missed."""
    parser = argparse.ArgumentParser(description="The longest block of a trainer's event loop.")
    parser.add_argument(
        "--quick", action="store_true", help="few rollouts: shows that it runs, proves nothing"
    )
    parser.add_argument("--json", action="store_true", help="one object per gate and line")
    parser.add_argument("--rollouts", type=int, default=2 * AT_ONCE)
    parser.add_argument("--rounds", type=int, default=1, help="ignored: one round of many rollouts")
    asked = parser.parse_args()
    count = 12 if asked.quick else asked.rollouts
    gates.RESULTS.mkdir(exist_ok=True)
    waiting, serving = _child("idle"), _child("model")
    try:
        assert serving.stdin is not None and serving.stdout is not None and waiting.stdin is not None  # noqa: PT018
        base_url = serving.stdout.readline().strip()
        keys = []
        for number in range(count):
            serving.stdin.write(f"{number % 3}\n")
            serving.stdin.flush()
            keys.append(serving.stdout.readline().strip())
        with tempfile.TemporaryDirectory(prefix="bench-", dir=gates.RESULTS) as folder:
            os.environ["ROLLOUTS_DATABASE_URL"] = f"sqlite:///{folder}/rollouts.db"
            dog, rewards = asyncio.run(_rollouts(count, base_url, keys, Path(folder)))
        idle_ms = waiting.communicate(timeout=30)[0].strip()
    finally:
        for process in (waiting, serving):
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()
    wanted = [(1.0, 0.0, 0.0)[number % 3] for number in range(count)]
    if rewards != wanted:
        print(
            f"the rollouts went wrong: {sum(a != b for a, b in zip(rewards, wanted, strict=True))}",
            file=sys.stderr,
        )
        return 1
    detail = {
        "rollouts": count, "at once": min(count, AT_ONCE), "callbacks": dog.callbacks,
        "longest on the clock, ms": round(dog.paused_ms, 1), "an idle loop's longest pause meanwhile, ms": idle_ms,
        "longest without garbage collections, ms": round(dog.own_ms, 1),
        "longest garbage collection in it, ms": round(dog.collected_ms, 1),
        "load": round(os.getloadavg()[0], 1), "mean reward": round(statistics.mean(rewards), 2),
        "where": dog.stack.strip().replace("\n", " | ")[-700:],
    }  # fmt: skip
    found = [
        Gate(gate="areal.longest_block_ms", value=dog.longest_ms, op="<=", target=50, rounds=1, detail=detail)
    ]
    gates.show(found, as_json=asked.json)
    gates.keep("areal-quick" if asked.quick else "areal", found)
    return int(not all(gate.ok for gate in found))
