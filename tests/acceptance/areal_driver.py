"""AReaL's real workflow executor and proxy over our package: `python areal_driver.py FOLDER`, in AReaL's interpreter.

Reads `orders.json` of the folder, (name, workflow class, record, econfig, samples) each, and writes `outcomes.json`:
whether AReaL accepted the task, and the rewards of its trajectories.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import areal_engine

if TYPE_CHECKING:
    from collections.abc import Iterator

_ALL_S = 200.0
_HANDED_OVER_S = 3.0
"""A rejected task has no result to wait for."""


def _post(url: str, body: dict[str, Any]) -> None:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"content-type": "application/json"}, method="POST"
    )
    urllib.request.urlopen(request, timeout=60).read()


@contextmanager
def _proxy(folder: Path) -> Iterator[str]:
    """Run AReaL's proxy in a process of its own, with our engine behind it."""
    from areal.utils.network import find_free_ports

    (port,) = find_free_ports(1)
    address = f"http://127.0.0.1:{port}"
    arguments = {
        "host": "127.0.0.1", "port": port, "experiment-name": "e", "trial-name": "t", "role": "rollout",
        "worker-index": 0, "nfs-record-root": folder / "names",
    }  # fmt: skip
    words = [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
    with (folder / "proxy.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "areal.experimental.openai.proxy.proxy_rollout_server", *words],
            stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        try:
            deadline = time.monotonic() + 120
            while True:
                try:
                    urllib.request.urlopen(f"{address}/health", timeout=5).read()
                    break
                except OSError:
                    if process.poll() is not None or time.monotonic() > deadline:
                        raise
                    time.sleep(0.2)
            made = {"turns": str(folder / "turns.json"), "tokenizer": str(folder / "tokenizer")}
            _post(f"{address}/create_engine", {"engine": "areal_engine.RecordedEngine", "init_kwargs": made})
            _post(f"{address}/call", {"method": "initialize"})
            yield address
        finally:
            process.kill()  # asked politely, it would wait for the answer that never comes
            process.wait()


def _class(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def _await_all(executor: Any, number: int) -> None:
    deadline = time.monotonic() + _ALL_S
    while (stats := executor.staleness_manager.get_stats()).accepted + stats.rejected < number:
        if time.monotonic() > deadline:
            raise TimeoutError(f"not every task of {number} ended: {stats}")
        time.sleep(0.2)


def main(folder: Path) -> None:
    """Give every order to the executor at once, as a training step does."""
    from areal.api.cli_args import InferenceEngineConfig
    from areal.experimental.openai import OpenAIProxyWorkflow
    from areal.infra import WorkflowExecutor
    from areal.infra.remote_inf_engine import GroupedRolloutWorkflow

    areal_engine.make_tokenizer(folder / "tokenizer")
    orders = json.loads((folder / "orders.json").read_text(encoding="utf-8"))
    config = InferenceEngineConfig(
        experiment_name="e", trial_name="t", consumer_batch_size=len(orders), max_concurrent_rollouts=len(orders),
        max_head_offpolicyness=1_000,
    )  # fmt: skip
    executor = WorkflowExecutor(config, SimpleNamespace(get_version=lambda: 7))
    executor.initialize(train_data_parallel_size=1)
    try:
        with _proxy(folder) as address:
            tasks = {}
            for order in orders:
                workflow: Any = OpenAIProxyWorkflow(
                    mode="inline", agent=_class(order["workflow"])(econfig=order["econfig"]), proxy_addr=address,
                    admin_api_key=areal_engine.ADMIN_KEY, export_style="concat",
                )  # fmt: skip
                if order["samples"] > 1:
                    workflow = GroupedRolloutWorkflow(workflow, order["samples"], logging.getLogger("group"))
                tasks[order["name"]] = executor.submit(order["record"], workflow)
            _await_all(executor, len(tasks))
            outcomes = {}
            for name, task in tasks.items():
                found = executor.wait_for_task(task, timeout=_HANDED_OVER_S, raise_timeout=False)
                outcomes[name] = None if found is None else [float(r) for r in found["rewards"]]
    finally:
        executor.destroy()
    from areal.utils import stats_tracker

    numbers = stats_tracker.get("rollout").export()
    (folder / "outcomes.json").write_text(json.dumps({"outcomes": outcomes, "stats": sorted(numbers)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
