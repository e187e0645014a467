"""What a trainer's process keeps out of garbage collections; each case is a process of its own, because it is for good."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import gc
from orchestrator.entry import loading
before = gc.get_freeze_count()
loading.load("swe")
loaded = gc.get_freeze_count(), gc.isenabled()
loading.freeze("a"); once = gc.get_freeze_count()
kept = [[] for _ in range(1000)]
loading.freeze("a"); again = gc.get_freeze_count()
loading.freeze("b"); later = gc.get_freeze_count()
print(before, *loaded, once > 50_000, again == once, later >= once + 1000)
"""


def test_loading_freezes_nothing_and_a_freeze_takes_what_is_there_once_for_each_occasion():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "0", "True", "True", "True", "True"]


def test_loading_leaves_a_collector_off_that_was_off():
    code = "import gc; gc.disable(); from orchestrator.entry import loading; loading.load('swe'); print(gc.isenabled())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
