"""What every sandbox backend promises. Steps, agents and graders know this page and nothing else of a backend.

A *provider* makes, finds and removes sandboxes; a *sandbox* runs commands. No caller assumes that a sandbox shares
the worker's file system, and every path here is a path inside the sandbox.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from orchestrator.tasks.record import Task


class Role(StrEnum):
    """What a sandbox is for; one rollout may own several, never two at a time."""

    TASK = "task"
    GRADING = "grading"


class Isolation(StrEnum):
    """How strongly a sandbox is kept apart from the machine it runs on."""

    BWRAP = "bwrap"
    UNSHARE = "unshare"
    NONE = "none"
    REMOTE = "remote"
    """On another machine, kept apart by whoever runs it."""


NON_INTERACTIVE_ENV: Mapping[str, str] = {
    "PAGER": "cat",
    "MANPAGER": "cat",
    "GIT_PAGER": "cat",
    "LESS": "-R",
    "PIP_PROGRESS_BAR": "off",
    "TQDM_DISABLE": "1",
    "CI": "1",
    "GIT_TERMINAL_PROMPT": "0",
    "PYTHONUNBUFFERED": "1",
    "DEBIAN_FRONTEND": "noninteractive",
}
"""Set for every command in every sandbox, so that nothing waits for a person."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Caps on what code in a sandbox may use. None leaves a resource uncapped."""

    memory_mb: int | None = 4096
    processes: int | None = 512
    file_mb: int | None = 1024
    """Largest single file."""
    cpu_s: int | None = None
    """CPU seconds of one process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxSpec:
    """Everything a provider needs to make one sandbox, written down before the create call goes out."""

    key: str
    """Ours, unique for ever, at most 63 characters, legal as a k8s label; put on the instance as its label."""
    role: Role
    task: Task
    limits: Limits = field(default_factory=Limits)
    network: bool = False
    fence: int = 0
    """The caller's fencing token, for the provider's own log."""
    ttl_s: int = 7200
    """The provider's own last net: after this the instance may vanish."""
    create_timeout_s: float = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandResult:
    """What one command did. `exit_code` is None when it was killed for its timeout."""

    exit_code: int | None
    output: bytes
    """Standard output and error interleaved: the first and last bytes when more than the cap was written."""
    output_bytes: int
    """How many bytes were written before capping."""
    timed_out: bool
    duration_s: float

    @property
    def truncated(self) -> bool:
        """True when `output` lacks its middle."""
        return self.output_bytes > len(self.output)


@dataclass(frozen=True, kw_only=True, slots=True)
class Instance:
    """One instance as the provider's own list shows it."""

    key: str
    provider_id: str


class Sandbox(Protocol):
    """A live sandbox. Every call raises `errors.SandboxLost` when the sandbox itself is gone.

    Cancelling a call kills what the call started inside the sandbox and re-raises.
    """

    key: str
    provider_id: str
    isolation: Isolation
    workdir: str
    """The repository, an absolute path (as the task record names it)."""
    private_dir: str
    """A directory that `run(private=True)` and `read`/`write` reach and, where the backend can, nothing else does."""

    async def shell(self, command: str, *, timeout_s: float, output_limit: int = 1_000_000) -> CommandResult:
        """Run one command in the sandbox's persistent bash session: directory and variables last.

        A command over its time is killed with every process it started, the session starts anew in `workdir`, and
        the result says `timed_out`. Standard input is empty.
        """
        ...

    async def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        private: bool = False,
        output_limit: int = 1_000_000,
    ) -> CommandResult:
        """Run one program apart from the session, in `workdir` unless `cwd` says otherwise; nothing of it survives.

        `env` adds to the sandbox's clean environment. Standard input is empty. With `private`, the program also
        sees `private_dir`; only programs of ours whose input is not under the agent's control may ask for that.
        """
        ...

    async def read(self, path: str, *, limit: int = 64 * 1024 * 1024) -> bytes:
        """Return a regular file's bytes; `FileNotFoundError` without one, `ValueError` beyond `limit`."""
        ...

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Replace a file, making its parent directories."""
        ...

    async def stop(self) -> None:
        """End every process in the sandbox, detached ones too. Files stay; a later call may start new ones."""
        ...

    async def alive(self) -> bool:
        """Say whether the sandbox can run commands."""
        ...

    async def detach(self) -> None:
        """Let go of local resources without releasing the sandbox."""
        ...


class SandboxProvider(Protocol):
    """Makes, finds and removes sandboxes of one kind."""

    name: str
    creates_late: bool
    """True when a create call that was cut off may still take effect, up to its timeout."""

    @property
    def ref(self) -> str:
        """The authority whose answer is proof, and all that it takes to ask it again.

        A control plane's address; for `local` the host, its boot id, and the folder that sandboxes lie in (device,
        inode, path). It is stored with every sandbox; another worker's provider may have another one.
        """
        ...

    @property
    def gaps(self) -> Sequence[str]:
        """What keeps sandboxes apart less well here than the settings ask for, in words; known after `preflight`."""
        ...

    async def preflight(self) -> Isolation:
        """Check that sandboxes can be made here and return how they are kept apart.

        Raises `errors.IsolationRefused` when isolation is `none` and that was not allowed.
        """
        ...

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """Make a sandbox whose repository is prepared: base tree, history of one commit, `pre_commands` run.

        Raises `errors.SandboxCreateFailed`, or `errors.TaskInvalid` when the record itself cannot be served here.
        Safe to call only once per key.
        """
        ...

    async def attach(self, spec: SandboxSpec, provider_id: str) -> Sandbox:
        """Return a sandbox that another process made; raises `errors.SandboxLost` when it is gone.

        Its shell session has the directory, exported variables and functions that the last one had; processes that
        were left running there may be gone.
        """
        ...

    async def release(self, key: str, ref: str | None = None) -> str:
        """Remove every instance with this key and return the proof that none is left, in words.

        `ref` is the authority under which the sandbox was made, as stored; without it, this provider's own. The
        proof is that authority's, whatever this provider's own is. Repeating it is harmless. Raises
        `errors.SandboxLost` when the authority cannot be asked from here.
        """
        ...

    async def list_ours(self, prefix: str, ref: str | None = None) -> list[Instance]:
        """Return every instance of an authority (see `release`) whose key starts with `prefix`.

        A failed list raises, it is never empty.
        """
        ...

    async def close(self) -> None:
        """Let go of connections; sandboxes stay."""
        ...
