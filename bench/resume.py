"""What it costs the database to resume rollouts whose reward is recorded: `python bench/resume.py [--quick] [--json]`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

if __name__ == "__main__":
    # This folder comes first on the path, where a file of it could stand in for a package of the same name.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    sys.exit(importlib.import_module("bench.resume_rounds").main())
