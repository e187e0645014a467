"""`python -m aweagent.maintenance.clean_instances`: what AReaL runs after a training job. Same as `rollouts clean`.

No arguments, within 600 seconds; exit code 0 when nothing remains. Needs neither AReaL nor the AEnvironment SDK.
"""

from __future__ import annotations

import os
import sys


def main() -> int:
    """Clean the database of the environment; print one line a sandbox that is left, a summary, and what to do about it."""
    try:
        return _clean()
    except KeyboardInterrupt:
        _say("interrupted: what is not removed yet stays written down; run it again")
        return 130


def _clean() -> int:
    import asyncio

    from orchestrator import assembly, errors
    from orchestrator.settings import maintenance_database_url

    url, doubt = maintenance_database_url()
    try:
        _say(f"database: {assembly.shown(url)}")
        if doubt:
            _say(f"WARNING: {doubt}")
        done = asyncio.run(assembly.clean(url))
    except (errors.RolloutsError, assembly.StoreError) as e:
        _say(f"error: {e}\nhint: {e.hint}")
        return 1
    for swept in done.swept:
        if swept.outcome in ("open", "stray"):
            _say(f"left: {swept.key}: {swept.detail}")
    for ref, why in done.unknown.items():
        _say(f"unknown: {ref} could not be asked: {why}")
    if done.resumable:
        _say(f"{done.resumable} unfinished rollouts that nobody has wait for `rollouts resume`")
    _say(done.counts)
    if not done.clean:
        _say("run it again when their provider answers, or see `rollouts clean --write-off`")
    return 0 if done.clean else 1


def _say(text: str) -> None:
    """Print a line; that nobody reads on is no reason to leave sandboxes behind."""
    try:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
