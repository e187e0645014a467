"""The gates of the durable store: `python bench/store.py [--quick] [--json] [--rounds N] [--only PART ...]`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

if __name__ == "__main__":
    # This folder comes first on the path, where this very file would stand in for the package `store`.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    sys.exit(importlib.import_module("bench.store_rounds.main").main())
