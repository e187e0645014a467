"""The benchmark runs from a checkout, speaks the language of gates, and says no when a gate is missed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gates import Gate, show

ROOT = Path(__file__).resolve().parents[2]
FIELDS = ["gate", "value", "op", "target", "ok", "rounds", "detail"]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "bench/store.py", "--quick", "--json", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.long
@pytest.mark.postgres
@pytest.mark.timeout(300)
def test_a_quick_run_prints_a_line_for_every_gate_and_exits_by_them():
    done = bench("--only", "slow-disk", "cpu", "postgresql", "sharing", "history", "memory", "--rounds", "1")
    gates = [json.loads(line) for line in done.stdout.splitlines()]
    assert [list(gate) for gate in gates] == [FIELDS] * len(gates), done.stderr
    assert {gate["gate"].removeprefix("store.") for gate in gates} == {
        "fdatasync_per_ack", "fdatasync_per_batch", "64_vs_raw", "lone_vs_raw", "cpu_64_vs_raw",
        "postgresql_64_vs_own", "smallest_share", "lost_leases", "claim_beside_history", "scan_beside_history",
        "claim_uses_live_index", "bytes_per_idle_rollout",
    }, done.stderr  # fmt: skip
    assert done.returncode == int(not all(gate["ok"] for gate in gates))
    counted = {gate["gate"]: gate["ok"] for gate in gates}
    for gate in (
        "fdatasync_per_ack",
        "fdatasync_per_batch",
        "claim_uses_live_index",
        "bytes_per_idle_rollout",
    ):
        assert counted[f"store.{gate}"], done.stdout


@pytest.mark.long
def test_a_part_that_cannot_be_measured_fails_the_run(tmp_path: Path):
    command = [sys.executable, str(ROOT / "bench" / "store.py"), "--quick", "--only", "slow-disk"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={"PATH": str(tmp_path), "HOME": str(tmp_path)},
    )
    assert done.returncode == 1
    assert "strace is not installed" in done.stderr


@pytest.mark.parametrize(("value", "ok"), [(9.99, False), (10.0, True), (11.0, True)])
def test_a_gate_holds_from_its_target_on(value: float, ok: bool, capsys: pytest.CaptureFixture[str]):
    gate = Gate(gate="x", value=value, op=">=", target=10, rounds=5, detail={"each round": [value]})
    show([gate], as_json=True)
    shown = json.loads(capsys.readouterr().out)
    assert list(shown) == FIELDS
    assert shown["ok"] is ok
    show([gate], as_json=False)
    assert ("MISSED" in capsys.readouterr().out) is not ok
