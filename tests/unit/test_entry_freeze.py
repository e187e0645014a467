"""What a trainer's process keeps out of garbage collections: shown in a process of its own, because it is for good."""

from __future__ import annotations

import gc
import subprocess
import sys

from orchestrator.entry import loading

CODE = """
import gc
from orchestrator.entry import loading
gc.disable()
loading.load("swe")
loaded = gc.get_freeze_count(), gc.isenabled()
loading.freeze("a")
once = gc.get_freeze_count()
kept = [[] for _ in range(1000)]
loading.freeze("a")
again = gc.get_freeze_count()
loading.freeze("b")
print(*loaded, once > 50_000, again == once, gc.get_freeze_count() >= once + 1000)
"""


def test_a_freeze_takes_what_is_there_once_for_each_occasion():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "False", "True", "True", "True"]


LOADED = """
import gc
from orchestrator.entry import loading
loading.load("swe")
print(gc.isenabled(), gc.get_freeze_count() > 50_000, end=" ")
loading.thaw()
print(gc.get_freeze_count())
"""


def test_what_is_loaded_meets_no_collection_unless_the_collector_is_to_be_left_alone():
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True", "0"]


def test_loading_holds_collections_up_and_leaves_the_collector_as_it_was():
    assert gc.isenabled()
    with loading._without_collections():
        assert not gc.isenabled()
        with loading._without_collections():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.unfreeze()
