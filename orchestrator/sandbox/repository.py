"""Hide and restore a sandbox's `.git`, and keep what the diff will need where the agent cannot reach it.

Under `private_dir`: `pristine.git` (the repository as prepared), `snapshot.git` (ours: byte-exact trees of the work
tree), `ignore/` (the base's ignore files), `base-paths`, and `base` (commit and tree), written last.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

from orchestrator import errors

if TYPE_CHECKING:
    from orchestrator.sandbox.base import CommandResult, Sandbox

KEEP_TIMEOUT_S = 300.0
GENERATED = ("__pycache__/", "*.pyc", ".pytest_cache/")
"""Caches of the interpreter and the test runner: no part of a patch unless the base tracks or un-ignores them."""


@cache
def script(package: str, name: str) -> str:
    """Return the text of a shell script that ships next to the modules of `package`."""
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")


async def run_script(
    sandbox: Sandbox, *parts: str, arguments: tuple[str, ...] = (), timeout_s: float
) -> CommandResult:
    """Run shell text of ours with access to `private_dir`, after the prelude that shuts the agent's settings out."""
    text = "\n".join((script("orchestrator.sandbox", "prelude.sh"), *parts))
    return await sandbox.run(
        ["bash", "--noprofile", "--norc", "-c", text, "repository", *arguments],
        timeout_s=timeout_s,
        env={
            "W": sandbox.workdir,
            "P": sandbox.private_dir,
            "GENERATED": "\n".join(GENERATED),
            "BASH_ENV": "",
        },
        private=True,
    )


async def keep_pristine(sandbox: Sandbox) -> str:
    """Copy the prepared repository and its base tree under `private_dir`; return the base commit.

    Verified: one commit, no other ref, nothing unreachable. Repeating it, also after a crash in the middle, is safe.
    Raises `errors.SandboxCreateFailed` when the repository is not as a provider has to prepare it.
    """
    return await _keep(sandbox, 'printf "%s\\n" "$commit"')


async def hide_git(sandbox: Sandbox) -> str:
    """Keep the pristine repository, then remove `<workdir>/.git`; return the base commit.

    Safe to repeat after a crash between the two. Raises as `keep_pristine` does.
    """
    return await _keep(sandbox, script("orchestrator.sandbox", "hide.sh"))


async def restore_git(sandbox: Sandbox) -> str:
    """Replace whatever is at `<workdir>/.git` by the pristine repository; return its HEAD, which is the base commit.

    Safe to repeat. Raises `errors.SandboxLost` when the pristine copy is gone or damaged.
    """
    result = await run_script(sandbox, script("orchestrator.sandbox", "restore.sh"), timeout_s=KEEP_TIMEOUT_S)
    if result.exit_code != 0:
        raise errors.SandboxLost(
            f"sandbox {sandbox.key}: the repository could not be restored ({describe(result)})",
            hint="start a new attempt in a new sandbox",
        )
    return result.output.decode().split()[-1]


async def _keep(sandbox: Sandbox, ending: str) -> str:
    result = await run_script(
        sandbox, script("orchestrator.sandbox", "keep.sh"), ending, timeout_s=KEEP_TIMEOUT_S
    )
    if result.exit_code != 0:
        raise errors.SandboxCreateFailed(
            f"sandbox {sandbox.key}: {sandbox.workdir} is not a repository fit for an agent ({describe(result)})",
            hint="a provider prepares one commit, one branch, no tags and no unreachable objects",
        )
    return result.output.decode().split()[-1]


def describe(result: CommandResult) -> str:
    """Say in one line how a script of ours ended."""
    ending = "timed out" if result.timed_out else f"exit {result.exit_code}"
    text = result.output[-500:].decode("utf-8", "backslashreplace").strip()
    return f"{ending}: {text}" if text else ending
