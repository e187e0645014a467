"""`python -m aweagent.maintenance.clean_instances`: what AReaL runs after a training job. Same as `rollouts clean`.

No arguments, within 600 seconds; exit code 0 when nothing remains. Needs neither AReaL nor the AEnvironment SDK.
"""

from __future__ import annotations

import sys


def main() -> int:
    """Clean the database of the environment; print one line a sandbox that is left, and one of summary."""
    import asyncio

    from orchestrator import assembly, errors
    from orchestrator.settings import maintenance_database_url

    url, doubt = maintenance_database_url()
    out = sys.stdout.write
    try:
        out(f"database: {assembly.shown(url)}\n")
        if doubt:
            out(f"WARNING: {doubt}\n")
        done = asyncio.run(assembly.clean(url))
    except (errors.RolloutsError, assembly.StoreError) as e:
        out(f"error: {e}\nhint: {e.hint}\n")
        return 1
    for swept in done.swept:
        if swept.outcome in ("open", "stray"):
            out(f"left: {swept.key}: {swept.detail}\n")
    for ref, why in done.unknown.items():
        out(f"unknown: {ref} could not be asked: {why}\n")
    outcomes = [swept.outcome for swept in done.swept]
    out(
        f"{outcomes.count('removed')} sandboxes removed, {outcomes.count('kept')} belong to live workers, "
        f"{outcomes.count('open') + outcomes.count('stray')} not proven gone\n"
    )
    return 0 if done.clean else 1


if __name__ == "__main__":
    sys.exit(main())
