"""A disk that is full, and then has room again: nothing that was acknowledged is lost, and work goes on."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from store import soundness

WRITES = Path(__file__).with_name("full_disk.py")
ON_A_SMALL_DISK = """set -e
mount -t tmpfs -o size=3m none disk
"$@" > told.json
cp disk/rollouts.db kept.db
if [ -e disk/rollouts.db-wal ]; then cp disk/rollouts.db-wal kept.db-wal; fi
"""


@pytest.mark.parametrize(("outage_s", "met"), [(60.0, ""), (0.5, "did not take 1 writes")])
def test_a_full_disk_costs_no_acknowledged_write(tmp_path: Path, outage_s: float, met: str):
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("NO SMALL DISK: mounting one needs root and `unshare`")
    (tmp_path / "disk").mkdir()
    ran = subprocess.run(
        ["unshare", "-m", "sh", "-c", ON_A_SMALL_DISK, "sh", sys.executable, WRITES, "disk", str(outage_s)],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    if ran.returncode != 0 and ran.stderr.startswith(("unshare", "mount")):
        pytest.skip(f"NO SMALL DISK: {ran.stderr.strip()}")
    assert ran.returncode == 0, ran.stderr
    assert "the database does not take writes" in ran.stderr
    told = json.loads((tmp_path / "told.json").read_text())
    assert set(told["told"]) == {"Applied"}
    assert met in told["met"]
    assert bool(met) == bool(told["met"])
    assert told["before"] >= 1
    with closing(sqlite3.connect(tmp_path / "kept.db")) as kept:
        names = [name for (name,) in kept.execute("SELECT name FROM steps ORDER BY name")]
    assert names == [f"{n:04}" for n in range(told["steps"])]
    assert soundness.complaints(f"sqlite:///{tmp_path / 'kept.db'}") == []
