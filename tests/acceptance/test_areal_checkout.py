"""AReaL itself, its proxy and its workflow executor, drive our package through their class and through ours.

Opt-in: `AREAL_SRC` names a checkout, `AREAL_PYTHON` an interpreter that has AReaL's packages and our requirements
(default: `.venv` of the checkout, else this one).
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from store.history import History
from tests.acceptance.test_areal_calls import ROOT, record

SOURCE = os.environ.get("AREAL_SRC")

pytestmark = [
    pytest.mark.areal,
    pytest.mark.long,
    pytest.mark.skipif(SOURCE is None, reason="NO AREAL: AREAL_SRC names no checkout of it"),
]

CLASSES = {"theirs": "examples.swe.agent.SWEAgentWorkflow", "ours": "orchestrator.areal.RolloutWorkflow"}
EXPECTED: dict[str, list[float] | None] = {
    "solves": [1.0], "wrong": [0.0], "looks": [0.0], "broken": None, "hangs": None, "invalid": None, "group": [1.0, 1.0],
}  # fmt: skip
"""Scenario -> the rewards AReaL trains on; None: it rejects the task."""


def asking(scenario: str) -> dict[str, Any]:
    """The record whose problem statement tells the engine what to play."""
    same = record()
    emptied: dict[str, Any] = {"FAIL_TO_PASS": []} if scenario == "invalid" else {}
    return {**same, **emptied, "problem_statement": f"{same['problem_statement']}\nScenario: {scenario}\n"}


def orders(config: Path) -> list[dict[str, Any]]:
    econfig = {"agent_type": "swe", "agent_config": str(config), "agent_root": str(ROOT)}
    return [
        {
            "name": f"{whose} {scenario}", "workflow": name,
            "record": asking("solves" if scenario == "group" else scenario),
            "econfig": {**econfig, "timeout": 15 if scenario == "hangs" else 100},
            "samples": 2 if scenario == "group" else 1,
        }
        for whose, name in CLASSES.items() for scenario in EXPECTED
    ]  # fmt: skip


def interpreter() -> str:
    own = Path(SOURCE or "") / ".venv" / "bin" / "python"
    return os.environ.get("AREAL_PYTHON") or (str(own) if own.exists() else sys.executable)


@pytest.mark.timeout(300)
async def test_areal_accepts_exactly_the_rollouts_that_have_a_reward_through_either_class(tmp_path: Path):
    (tmp_path / "config.yaml").write_text(
        "extends: train\nllm: {connect_retries: 0}\nretry: {backoff_base_s: 0}\n"
    )
    (tmp_path / "orders.json").write_text(json.dumps(orders(tmp_path / "config.yaml")))
    recorded = yaml.safe_load((ROOT / "examples" / "replay.yaml").read_text())["offline__wordcount-1"]
    names = ("solves", "wrong", "looks")
    turns = {name: scenario["turns"] for name, scenario in zip(names, recorded, strict=True)}
    (tmp_path / "turns.json").write_text(json.dumps({**turns, "invalid": []}))
    database = f"sqlite:///{tmp_path / 'rollouts.db'}"
    ran = await asyncio.to_thread(
        subprocess.run,
        [interpreter(), str(ROOT / "tests" / "acceptance" / "areal_driver.py"), str(tmp_path)],
        cwd=SOURCE, capture_output=True, text=True, check=False, timeout=240,
        env={
            **os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{SOURCE}", "ROLLOUTS_DATABASE_URL": database,
            "LOG_DIR": str(tmp_path / "logs"), "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]
    said = json.loads((tmp_path / "outcomes.json").read_text())
    outcomes = said["outcomes"]
    sys.stdout.write("\n" + "".join(f"{name}: {outcome}\n" for name, outcome in outcomes.items()))
    assert outcomes == {f"{whose} {name}": want for whose in CLASSES for name, want in EXPECTED.items()}
    history = History.of(database)
    try:
        given = await history.sql(
            "SELECT kind, value, stored_reward FROM deliveries_v", limit=99, timeout_s=10
        )
        states = await history.sql("SELECT DISTINCT state FROM rollouts", limit=9, timeout_s=10)
    finally:
        await history.close()
    values = sorted(row[1] for row in given.rows if row[0] == "value")
    assert values == sorted(2 * [reward for rewards in EXPECTED.values() for reward in rewards or []])
    assert all(row[1] == row[2] for row in given.rows)
    assert {row[0] for row in states.rows} <= {"released", "failed"}
    assert {"rollout/resolved", "rollout/grade_s", "rollout/n_llm_calls"} <= set(said["stats"])
