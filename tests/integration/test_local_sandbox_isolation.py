"""What code in a local sandbox cannot do to the machine, and what a dead worker leaves behind: nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator import errors
from orchestrator.sandbox import cgroups
from orchestrator.sandbox.base import Isolation, Limits, Role, SandboxSpec
from orchestrator.sandbox.local import LocalProvider
from orchestrator.settings import SandboxSettings
from orchestrator.tasks.record import DatasetKind, RepoSource, Task

if TYPE_CHECKING:
    from orchestrator.sandbox.base import Sandbox

SECRET = "s3cr3t-of-the-worker"


@pytest.fixture
def task(tmp_path):
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "module.py").write_text("answer = 41\n")
    return Task(
        instance_id="demo__demo-1",
        dataset_kind=DatasetKind.LOCAL,
        workdir="/testbed",
        problem_statement="x",
        repo_source=RepoSource(kind="tree", path=tree),
        gold_patch=b"gold",
    )


def make_provider(tmp_path: Path, **settings: Any) -> LocalProvider:
    chosen = SandboxSettings(root=tmp_path / "boxes", python=Path(sys.executable), **settings)
    return LocalProvider(chosen, cache_dir=tmp_path / "cache")


@pytest.fixture(params=["bwrap", "unshare"])
async def box(request, tmp_path, task):
    provider = make_provider(tmp_path, isolation=request.param)
    try:
        await provider.preflight()
    except errors.IsolationRefused as refused:
        pytest.skip(str(refused))
    spec = SandboxSpec(
        key=f"isolation-{request.param}-{os.getpid()}",
        role=Role.TASK,
        task=task,
        limits=Limits(processes=64, file_mb=8, memory_mb=512),
    )
    sandbox = await provider.create(spec)
    yield sandbox
    await sandbox.detach()
    await provider.release(spec.key)
    assert not list(Path("/sys/fs/cgroup").glob(f"*/areal-sweagent.*.{spec.key}"))


async def say(sandbox: Sandbox, command: str, timeout_s: float = 20) -> str:
    result = await sandbox.shell(command, timeout_s=timeout_s)
    return result.output.decode(errors="replace").strip()


async def test_nothing_of_this_machine_but_its_programs_is_visible(box, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    assert set((await say(box, "ls -A /")).split()) <= {
        "bin", "sbin", "lib", "lib64", "lib32", "libx32", "usr", "etc", "proc", "dev", "tmp", "home", "testbed",
        *(Path(p).parts[1] for p in (sys.prefix, sys.base_prefix)),
    }  # fmt: skip
    checkout = Path(__file__).resolve().parents[2]
    for hidden in (
        checkout / "orchestrator",
        tmp_path,
        Path.home() / ".ssh",
        "/var",
        "/sys",
        "/etc/shadow",
        "/run",
    ):
        assert await say(box, f"test -e '{hidden}' && echo there") == "", hidden
    assert "private" not in await say(box, "ls -A / /tmp ~")


async def test_no_secret_of_the_worker_is_inherited(box, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    environments = await say(box, "env; cat /proc/*/environ | tr '\\0' '\\n'")
    assert SECRET not in environments
    assert "AREAL_SWEAGENT" not in (await box.run(["env"], timeout_s=20)).output.decode()
    assert "GIT_CEILING_DIRECTORIES=/\n" in environments + "\n"
    assert await say(box, "command -v python") == str(Path(sys.executable).parent / "python")


async def test_there_is_no_network_but_an_inner_loopback(box):
    with socket.create_server(("127.0.0.1", 0)) as outside:
        port = outside.getsockname()[1]
        probe = f"exec 7<>/dev/tcp/127.0.0.1/{port}"
        assert (await box.run(["bash", "-c", probe], timeout_s=20)).exit_code != 0
    assert (await say(box, "cat /proc/net/dev | tail -n +3 | cut -d: -f1")).split() == ["lo"]
    serve = (
        "import socket; s = socket.create_server(('127.0.0.1', 0)); socket.create_connection(s.getsockname())"
    )
    assert (await box.run(["python", "-c", serve], timeout_s=20)).exit_code == 0


async def test_the_system_and_the_kernel_settings_are_read_only(box):
    for place in ("/x", "/usr/x", "/etc/x", "/dev/x", "/bin/x", f"{sys.base_prefix}/x"):
        assert (await box.shell(f"touch {place}", timeout_s=20)).exit_code != 0, place
    writable = await say(box, "find /proc/sys /proc/irq /proc/fs -type f -writable 2>/dev/null | head -3")
    assert writable == ""
    # Opened for writing only, never written: were it possible, this machine would be changed.
    assert (await box.shell(": 1<>/proc/sys/kernel/core_pattern", timeout_s=20)).exit_code != 0
    assert "0000000000000000" in await say(box, "grep CapBnd /proc/self/status")
    assert (await say(box, "id -u; whoami")).split() == ["1000", "agent"]
    assert (await box.shell("mount -t tmpfs none /tmp", timeout_s=20)).exit_code != 0


async def test_a_file_cannot_grow_beyond_its_cap(box):
    result = await box.shell("head -c 10G /dev/zero > big; stat -c %s big", timeout_s=30)
    assert result.output.split()[-1] == str(8 * 1024 * 1024).encode()


async def test_a_process_cannot_take_more_memory_than_its_cap(box):
    result = await box.run(["python", "-c", "x = bytearray(10**9)"], timeout_s=30)
    assert b"MemoryError" in result.output


async def test_a_flood_of_output_neither_fills_memory_nor_blocks_the_loop(box):
    flood = asyncio.ensure_future(box.shell("yes", timeout_s=1.5, output_limit=1000))
    ticks = 0
    while not flood.done():
        await asyncio.wait({flood}, timeout=0.01)
        ticks += 1
    assert ticks > 20
    assert len(flood.result().output) == 1000
    assert flood.result().output_bytes > 1_000_000


@pytest.mark.skipif(
    not any("pids" in h.controllers for h in cgroups.find_hierarchies()) and os.geteuid() == 0,
    reason="root's processes are counted only by cgroups, and none is writable here",
)
async def test_a_fork_bomb_stops_at_its_cap_and_dies_at_its_timeout(box):
    bomb = "f() { f & f & }; for i in $(seq 200); do sleep 100 & done; f; wait"
    most = 0

    async def count() -> None:
        nonlocal most
        group = next(Path("/sys/fs/cgroup").glob(f"*/areal-sweagent.*.{box.key}"), None)
        while group is not None:
            most = max(most, int((group / "pids.current").read_text()))
            await asyncio.sleep(0.02)

    counter = asyncio.ensure_future(count())
    result = await box.shell(bomb, timeout_s=1.5)
    counter.cancel()
    assert most <= 64
    assert result.timed_out or result.exit_code != 0
    await box.stop()
    assert await say(box, "echo calm") == "calm"


async def test_a_program_that_fills_many_descriptors_is_stopped(box):
    script = "import os; [os.open('/dev/null', 0) for _ in range(100000)]"
    assert b"Too many open files" in (await box.run(["python", "-c", script], timeout_s=20)).output


async def test_sixteen_sandboxes_at_once_stay_apart(tmp_path, task):
    provider = make_provider(tmp_path)
    await provider.preflight()
    specs = [SandboxSpec(key=f"many-{os.getpid()}-{i}", role=Role.TASK, task=task) for i in range(16)]

    async def use(number: int, spec: SandboxSpec) -> str:
        sandbox = await provider.create(spec)
        await sandbox.shell(f"echo {number} > own; export N={number}", timeout_s=60)
        answer = await say(sandbox, "echo $N; cat own; git status --porcelain", timeout_s=60)
        await sandbox.detach()
        await provider.release(spec.key)
        return answer

    answers = await asyncio.gather(*(use(i, spec) for i, spec in enumerate(specs)))
    assert answers == [f"{i}\n{i}\n?? own" for i in range(16)]
    assert list((tmp_path / "boxes").iterdir()) == []


DYING_WORKER = """
import asyncio, sys
from pathlib import Path
from orchestrator.sandbox.base import Role, SandboxSpec
from orchestrator.sandbox.local import LocalProvider
from orchestrator.settings import SandboxSettings
from orchestrator.tasks.record import Task

async def main():
    settings = SandboxSettings(
        root=Path(sys.argv[1]), python=Path(sys.executable), isolation=sys.argv[3], allow_no_isolation=True
    )
    provider = LocalProvider(settings, cache_dir=Path(sys.argv[1]) / "cache")
    spec = SandboxSpec(key=sys.argv[4], role=Role.TASK, task=Task.model_validate_json(sys.argv[2]))
    box = await provider.create(spec)
    await box.shell("setsid -f sleep 777; nohup sleep 777 >/dev/null 2>&1 & mkdir -p x/y; chmod 000 x", timeout_s=60)
    print("ready", flush=True)
    await box.shell("setsid -f sleep 777; sleep 777", timeout_s=777)

asyncio.run(main())
"""


@pytest.mark.parametrize("isolation", ["bwrap", "unshare", "none"])
async def test_a_killed_worker_leaves_nothing_that_release_does_not_find(tmp_path, task, isolation):
    provider = make_provider(tmp_path, isolation=isolation, allow_no_isolation=True)
    key = f"orphan-{isolation}-{os.getpid()}"
    arguments = [str(tmp_path / "boxes"), task.to_json(), isolation, key]
    worker = await asyncio.create_subprocess_exec(
        sys.executable, "-c", DYING_WORKER, *arguments,
        stdout=subprocess.PIPE, cwd=Path(__file__).resolve().parents[2],
    )  # fmt: skip
    assert worker.stdout is not None
    assert await worker.stdout.readline() == b"ready\n"
    assert sleepers(key)
    worker.send_signal(signal.SIGKILL)
    await worker.wait()
    assert [i.key for i in await provider.list_ours("orphan-")] == [key]
    proof = await provider.release(key)
    assert key in proof
    assert provider.ref in proof
    assert await settled(key, 0) == []
    assert not (tmp_path / "boxes" / key).exists()
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()
    assert await provider.release(key)


def sleepers(key: str) -> list[str]:
    """Live processes whose mounts or directory are the sandbox's."""
    found = []
    for proc in Path("/proc").iterdir():
        if not proc.name.isdigit():
            continue
        try:
            argv = (proc / "cmdline").read_bytes().split(b"\0")
            inside = f"{key}/work" in (proc / "mountinfo").read_text() or key in str(
                (proc / "cwd").readlink()
            )
        except OSError:
            continue
        if argv[0] == b"sleep" and inside:
            found.append(proc.name)
    return found


async def settled(key: str, count: int) -> list[str]:
    """The sandbox's sleepers once there are `count` of them, or after five seconds."""
    deadline = time.monotonic() + 5
    while len(found := sleepers(key)) != count and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    return found


async def test_the_machine_has_no_process_of_a_call_once_it_returns(box):
    leave = ["bash", "-c", "for i in 1 2 3; do setsid -f sleep 779; done"]
    for _ in range(5):
        assert (await box.run(leave, timeout_s=20)).exit_code == 0
        assert sleepers(box.key) == []
    assert (await box.run([*leave[:2], f"{leave[2]}; sleep 779"], timeout_s=0.3)).timed_out
    assert sleepers(box.key) == []
    assert (await box.shell(f"{leave[2]}; sleep 779", timeout_s=0.3)).timed_out
    assert sleepers(box.key) == []
    await box.shell(leave[2], timeout_s=20)
    assert len(await settled(box.key, 3)) == 3
    await box.stop()
    assert sleepers(box.key) == []


@pytest.mark.parametrize("isolation", ["bwrap", "unshare"])
async def test_read_only_paths_may_lie_below_the_temporary_folder(tmp_path, task, isolation):
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "data").write_text("shared")
    provider = make_provider(tmp_path, isolation=isolation, read_only_paths=(shared,))
    spec = SandboxSpec(key=f"shared-{isolation}-{os.getpid()}", role=Role.TASK, task=task)
    sandbox = await provider.create(spec)
    assert await say(sandbox, f"cat {shared}/data; touch {shared}/x || echo refused") == (
        f"sharedtouch: cannot touch '{shared}/x': Read-only file system\nrefused"
    )
    assert await sandbox.read(f"{shared}/data") == b"shared"
    covering = spec.task.model_copy(update={"workdir": str(tmp_path)})
    with pytest.raises(errors.TaskInvalid, match="would cover"):
        await provider.create(SandboxSpec(key=f"covering-{os.getpid()}", role=Role.TASK, task=covering))
    await provider.release(spec.key)


async def test_going_without_isolation_must_be_allowed(tmp_path):
    provider = make_provider(tmp_path, isolation="none")
    with pytest.raises(errors.IsolationRefused) as caught:
        await provider.preflight()
    assert "apt-get install bubblewrap" in caught.value.hint
    assert "--allow-no-isolation" in caught.value.hint
    assert (
        await make_provider(tmp_path, isolation="none", allow_no_isolation=True).preflight() is Isolation.NONE
    )


async def test_a_root_that_belongs_to_a_link_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "boxes").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(errors.UsageError, match="somebody else"):
        await make_provider(tmp_path).preflight()


async def test_keys_that_are_paths_are_refused(tmp_path):
    for key in ("../x", "a/b", "", ".hidden", "UPPER", "x" * 64):
        with pytest.raises(errors.UsageError):
            await make_provider(tmp_path).release(key)


async def test_release_follows_no_link_and_copes_with_any_depth(tmp_path, task):
    provider = make_provider(tmp_path)
    spec = SandboxSpec(key=f"deep-{os.getpid()}", role=Role.TASK, task=task)
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("kept")
    sandbox = await provider.create(spec)
    dig = "import os\nfor _ in range(1200):\n    os.mkdir('d')\n    os.chdir('d')"
    assert (await sandbox.run(["python", "-c", dig], timeout_s=60)).exit_code == 0
    (tmp_path / "boxes" / spec.key / "work" / "link").symlink_to(precious)
    await sandbox.detach()
    await provider.release(spec.key)
    assert (precious / "file").read_text() == "kept"
    assert await provider.list_ours("") == []


async def test_a_cancelled_creation_leaves_nothing(tmp_path, task):
    provider = make_provider(tmp_path)
    await provider.preflight()
    slow = task.model_copy(update={"pre_commands": "touch began; setsid -f sleep 778; sleep 778"})
    spec = SandboxSpec(key=f"cancelled-{os.getpid()}", role=Role.TASK, task=slow)
    creating = asyncio.ensure_future(provider.create(spec))
    began = tmp_path / "boxes" / spec.key / "work" / "began"
    while not began.exists():
        await asyncio.wait({creating}, timeout=0.01)
    creating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await creating
    assert await provider.list_ours("") == []
    assert sleepers(spec.key) == []
