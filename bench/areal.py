"""How long a trainer's event loop stands still for us: `python bench/areal.py [--quick] [--json] [--rollouts N]`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

if __name__ == "__main__":
    # This folder comes first on the path, where a file of it could stand in for a package of the same name.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    sys.exit(importlib.import_module("bench.areal_rounds").main())
