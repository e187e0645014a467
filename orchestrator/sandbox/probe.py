"""`python -m orchestrator.sandbox.probe`: can this machine keep sandboxes apart? Says how; exit code 1 when it cannot."""

from __future__ import annotations

import asyncio
import sys

from orchestrator import errors, settings
from orchestrator.sandbox import registry


def main() -> int:
    """Print the isolation that the default settings lead to here."""
    provider = registry.make(settings.load("train").sandbox, cache_dir=settings.cache_dir())
    try:
        isolation = asyncio.run(provider.preflight())
    except errors.IsolationRefused as e:
        sys.stderr.write(f"{e}\n")
        return 1
    for gap in provider.gaps:
        sys.stderr.write(f"warning: {gap}\n")
    sys.stdout.write(f"{isolation.value}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
