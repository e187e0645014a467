"""The behaviour every sandbox backend owes its callers, as plain functions: run them against a backend of your own.

Each check makes its sandboxes through `provider` from specs that `new_spec()` gives (a fresh key each time, the task
of any small repository), releases them, and raises `AssertionError` with what was expected.
"""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from typing import TYPE_CHECKING

from orchestrator import errors
from orchestrator.sandbox.base import Isolation

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from orchestrator.sandbox.base import CommandResult, Sandbox, SandboxProvider, SandboxSpec

    SpecFactory = Callable[[], SandboxSpec]
    Check = Callable[[SandboxProvider, SpecFactory], Awaitable[None]]

_LONG_S = 60.0
_SHORT_S = 1.0
_PROMPT_S = 5.0
"""Far below the sleeps that a hanging call would wait for, far above what a busy machine needs."""
_HUGE = 100_000


def _expect(actual: object, expected: object, what: str) -> None:
    if actual != expected:
        raise AssertionError(f"{what}: expected {expected!r}, got {actual!r}")


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(what)


@contextlib.asynccontextmanager
async def _made(provider: SandboxProvider, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
    try:
        sandbox = await provider.create(spec)
        try:
            yield sandbox
        finally:
            await sandbox.detach()
    finally:
        await provider.release(spec.key)


async def _say(sandbox: Sandbox, command: str) -> str:
    return (await sandbox.shell(command, timeout_s=_LONG_S)).output.decode(errors="replace").strip()


async def check_a_prepared_repository_has_one_commit(
    provider: SandboxProvider, new_spec: SpecFactory
) -> None:
    """One commit on one branch, nothing else reachable, nothing to commit."""
    async with _made(provider, new_spec()) as box:
        _expect(await _say(box, "git rev-list --all --count"), "1", "commits")
        _expect(await _say(box, "git for-each-ref --format='%(refname)' | wc -l"), "1", "refs")
        _expect(await _say(box, "git remote; git stash list; git tag"), "", "remotes, stashes, tags")
        _expect(await _say(box, "git status --porcelain"), "", "changes")
        _expect(
            await _say(box, "git fsck --unreachable --no-progress 2>/dev/null"), "", "unreachable objects"
        )


async def check_the_session_keeps_directory_and_variables(
    provider: SandboxProvider, new_spec: SpecFactory
) -> None:
    """State lasts from one command to the next, the last exit status too."""
    async with _made(provider, new_spec()) as box:
        _expect(await _say(box, "pwd"), box.workdir, "first directory")
        await _say(
            box, "mkdir -p deep/er && cd deep/er && export X='a b' && f() { echo \"f:$X\"; }; declare -i N=4"
        )
        _expect(await _say(box, "pwd; f; echo $N"), f"{box.workdir}/deep/er\nf:a b\n4", "state")
        _expect((await box.shell("(exit 7)", timeout_s=_LONG_S)).exit_code, 7, "exit code")
        _expect(await _say(box, "echo $?"), "7", "status of the command before")


async def check_hard_commands_give_sane_results(provider: SandboxProvider, new_spec: SpecFactory) -> None:
    """Whatever a command does to its shell, it has a result and the next command works."""
    cases: list[tuple[str, int | None, str | None]] = [
        ("exit 3", 3, ""),
        ("exec echo replaced", 0, "replaced"),
        ("kill -9 $$", 137, ""),
        ("set -e; false; echo no", 1, ""),
        ("cat <<'END'\na 'quoted' \"line\" $HOME\nEND", 0, "a 'quoted' \"line\" $HOME"),
        (f"printf %s '{'x' * _HUGE}' | wc -c", 0, str(_HUGE)),
        ("echo before > /dev/stderr; echo after", 0, "before\nafter"),
        ("exec > /dev/null", 0, ""),
        ("cat", 0, ""),
        ("printf '\\377\\n' | od -An -tx1 | tr -d ' \\n'", 0, "ff0a"),
        ("", 0, ""),
        ("# only a comment", 0, ""),
    ]
    async with _made(provider, new_spec()) as box:
        for command, code, output in cases:
            result = await box.shell(command, timeout_s=_LONG_S)
            _expect(result.exit_code, code, f"exit code of {command[:40]!r}")
            _expect(result.output.decode(errors="replace").strip(), output, f"output of {command[:40]!r}")
        for broken in ("echo 'unbalanced", "if true; then", "break", "$(", "}", "cat <<X"):
            result = await box.shell(broken, timeout_s=_LONG_S)
            _require(result.exit_code is not None, f"{broken!r} hangs the session")
            _expect(await _say(box, "echo works"), "works", f"the command after {broken!r}")


async def check_a_background_child_does_not_hold_up_its_command(
    provider: SandboxProvider, new_spec: SpecFactory
) -> None:
    """Return as soon as the command has, although a child keeps the output open."""
    async with _made(provider, new_spec()) as box:
        result = await box.shell("sleep 300 & setsid sleep 300 & echo started", timeout_s=_LONG_S)
        _expect((result.exit_code, result.output.strip()), (0, b"started"), "result")
        _require(result.duration_s < _PROMPT_S, f"the call took {result.duration_s} s")


async def check_a_timeout_kills_everything_and_the_session_starts_anew(
    provider: SandboxProvider, new_spec: SpecFactory
) -> None:
    """Detached children die as well; directory and variables are as at the beginning."""
    async with _made(provider, new_spec()) as box:
        nap = _nap(box)
        await _say(box, "cd / && export X=1")
        result = await box.shell(
            f"echo early; nohup sleep {nap} >/dev/null 2>&1 & setsid -f sleep {nap}; sleep {nap}",
            timeout_s=_SHORT_S,
        )
        _expect((result.exit_code, result.timed_out), (None, True), "result")
        _expect(result.output, b"early\n", "output of the command that ran out of time")
        _expect(await _say(box, "pwd; echo ${X-unset}"), f"{box.workdir}\nunset", "new session")
        _expect(await _sleepers(box), 0, "processes left")


async def check_cancelling_kills_what_the_call_started(
    provider: SandboxProvider, new_spec: SpecFactory
) -> None:
    """Promptly, for both kinds of calls, and the cancellation passes through."""
    async with _made(provider, new_spec()) as box:
        loop = asyncio.get_running_loop()
        text = f"setsid -f sleep {_nap(box)}; sleep {_nap(box)}"
        calls: list[Callable[[], Awaitable[CommandResult]]] = [
            lambda: box.shell(f"touch shell.began; {text}", timeout_s=_LONG_S),
            lambda: box.run(["bash", "-c", f"touch run.began; {text}"], timeout_s=_LONG_S),
        ]
        for call in calls:
            task = asyncio.ensure_future(call())
            await _appears(box, "*.began")
            started = loop.time()
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            _require(task.cancelled(), "the cancellation was swallowed")
            _require(loop.time() - started < _PROMPT_S, "cancelling took too long")
            _expect(await _sleepers(box), 0, "processes left")
            await _say(box, "rm -f *.began")


async def check_a_program_leaves_nothing_running(provider: SandboxProvider, new_spec: SpecFactory) -> None:
    """`run` returns its program's own exit code, and only when all it started is dead."""
    async with _made(provider, new_spec()) as box:
        nap = _nap(box)
        result = await box.run(
            ["bash", "-c", f"setsid -f sleep {nap}; echo out; echo err >&2; exit 5"], timeout_s=_LONG_S
        )
        _expect((result.exit_code, result.timed_out), (5, False), "result")
        _expect(sorted(result.output.split()), [b"err", b"out"], "output")
        _expect(await _sleepers(box), 0, "processes left")
        killed = await box.run(["bash", "-c", f"setsid -f sleep {nap}; sleep {nap}"], timeout_s=_SHORT_S)
        _expect((killed.exit_code, killed.timed_out), (None, True), "result of a program over its time")
        _expect(await _sleepers(box), 0, "processes left after the timeout")


async def check_arguments_and_variables_arrive_unchanged(
    provider: SandboxProvider, new_spec: SpecFactory
) -> None:
    """No shell reads the arguments; `cwd` and `env` count; a missing program is 127."""
    async with _made(provider, new_spec()) as box:
        arguments = ["a b", "$HOME", "'", '"', "*", "-n", "", "tab\there", "new\nline", "\N{SNOWMAN}"]
        result = await box.run(["printf", "%s|", *arguments], timeout_s=_LONG_S)
        _expect(result.output.decode(), "".join(f"{a}|" for a in arguments), "arguments")
        result = await box.run(
            ["bash", "-c", 'pwd; echo "$GREETING"'], timeout_s=_LONG_S, cwd="/", env={"GREETING": "hi you"}
        )
        _expect(result.output, b"/\nhi you\n", "directory and variable")
        _expect(
            (await box.run(["no-such-program-here"], timeout_s=_LONG_S)).exit_code, 127, "missing program"
        )


async def check_output_is_capped_at_head_and_tail(provider: SandboxProvider, new_spec: SpecFactory) -> None:
    """Count the size in full, drop the middle, keep memory small."""
    async with _made(provider, new_spec()) as box:
        command = "echo first; head -c 3000000 /dev/zero | tr '\\0' x; echo; echo last"
        for result in (
            await box.shell(command, timeout_s=_LONG_S, output_limit=1000),
            await box.run(["bash", "-c", command], timeout_s=_LONG_S, output_limit=1000),
        ):
            _expect(result.output_bytes, 3_000_012, "bytes counted")
            _require(len(result.output) <= 1000, f"{len(result.output)} bytes kept")
            _require(
                result.output.startswith(b"first\nx") and result.output.endswith(b"x\nlast\n"),
                "head and tail",
            )
            _require(result.truncated, "not marked as truncated")
        _expect((await box.shell("echo 12", timeout_s=_LONG_S, output_limit=3)).output, b"12\n", "exact fit")


async def check_files_round_trip(provider: SandboxProvider, new_spec: SpecFactory) -> None:
    """Bytes are bytes, parents are made, modes are set, limits and missing files are errors of their own."""
    async with _made(provider, new_spec()) as box:
        data = bytes(range(256)) * 20
        path = f"{box.workdir}/new dir/na\N{LATIN SMALL LETTER I WITH DIAERESIS}ve.bin"
        await box.write(path, data, mode=0o755)
        _expect(await box.read(path), data, "content")
        _expect(await _say(box, "stat -c %a 'new dir'/*"), "755", "mode")
        await box.write(path, b"")
        _expect(await box.read(path), b"", "replaced content")
        await box.write(path, b"12345")
        await _raises(ValueError, box.read(path, limit=4), "a file beyond the limit")
        await _raises(FileNotFoundError, box.read(f"{box.workdir}/none"), "a missing file")
        await _raises(OSError, box.read(f"{box.workdir}/new dir"), "a directory")
        await _say(box, "mkfifo fifo")
        async with asyncio.timeout(_PROMPT_S):
            await _raises(FileNotFoundError, box.read(f"{box.workdir}/fifo"), "a fifo")


async def check_links_lead_nowhere_but_inside(provider: SandboxProvider, new_spec: SpecFactory) -> None:
    """Follow a link as inside the sandbox; the worker's own files are out of reach."""
    async with _made(provider, new_spec()) as box:
        await _say(
            box,
            "echo inner > real; ln -s real near; ln -s loop loop; ln -s / root; mkdir d; ln -s ../real d/up",
        )
        for name in ("near", "d/up", f"root{box.workdir}/real"):
            if box.isolation is not Isolation.NONE or not name.startswith("root"):
                _expect(await box.read(f"{box.workdir}/{name}"), b"inner\n", name)
        await _raises(OSError, box.read(f"{box.workdir}/loop"), "a link to itself")
        await _say(box, "ln -s /etc/hostname outside; ln -s /proc/1/environ process; ln -s /var hole")
        for name in ("outside", "process", "hole/x", "root/proc/self/environ"):
            await _raises(OSError, box.read(f"{box.workdir}/{name}"), name)
        for name in ("outside", "process", "hole/x"):
            await _raises(OSError, box.write(f"{box.workdir}/{name}", b"x"), f"writing through {name}")
        await box.write(f"{box.workdir}/near", b"edited\n")
        _expect(await _say(box, "cat real"), "edited", "a write through a link inside")


async def check_the_private_directory_is_private(provider: SandboxProvider, new_spec: SpecFactory) -> None:
    """`read`, `write` and private programs reach it; nothing else does, where the backend can."""
    async with _made(provider, new_spec()) as box:
        path = f"{box.private_dir}/deep/secret"
        await box.write(path, b"s3cret")
        _expect(await box.read(path), b"s3cret", "content")
        _expect(
            (await box.run(["cat", path], timeout_s=_LONG_S, private=True)).output,
            b"s3cret",
            "private program",
        )
        if box.isolation in {Isolation.BWRAP, Isolation.UNSHARE}:
            _require(
                (await box.run(["cat", path], timeout_s=_LONG_S)).exit_code != 0, "a plain program sees it"
            )
            _expect(
                await _say(box, f"cat {path} 2>/dev/null; ls -A {box.private_dir} 2>/dev/null"),
                "",
                "the agent sees it",
            )


async def check_stop_ends_every_process_and_keeps_files(
    provider: SandboxProvider, new_spec: SpecFactory
) -> None:
    """After `stop` nothing runs; a later call works on the same files."""
    async with _made(provider, new_spec()) as box:
        await _say(box, f"echo kept > note; setsid -f sleep {_nap(box)}; sleep {_nap(box)} &")
        await box.stop()
        _expect(await _sleepers(box), 0, "processes left")
        _expect(await _say(box, "cat note"), "kept", "file")
        _require(await box.alive(), "a stopped sandbox cannot run commands")


async def check_attaching_finds_the_same_files(provider: SandboxProvider, new_spec: SpecFactory) -> None:
    """`attach` gives a working sandbox over the same folder whose session goes on where the last one stopped."""
    spec = new_spec()
    async with _made(provider, spec) as box:
        await _say(box, "echo mine > ~/note; export GREETING='hi\nyou'; twice() { echo $1 $1; }; cd /usr")
        await box.write(f"{box.workdir}/edited", b"1")
        await box.detach()
        other = await provider.attach(spec, box.provider_id)
        try:
            seen = await _say(other, f'pwd; twice "$GREETING"; cat {box.workdir}/edited ~/note')
            _expect(seen, "/usr\nhi you hi you\n1mine", "directory, function, variable and files")
            _expect(other.key, spec.key, "key")
        finally:
            await other.detach()
        await _raises(errors.SandboxLost, provider.attach(spec, "somebody-else's"), "a wrong provider id")


async def check_release_is_proof_and_repeatable(provider: SandboxProvider, new_spec: SpecFactory) -> None:
    """List it while it lives; it is gone afterwards, everything on it raises `SandboxLost`, and again is harmless."""
    spec = new_spec()
    async with _made(provider, spec) as box:
        await _say(box, "mkdir -p a/b; echo x > a/b/c; chmod 000 a/b; chmod 555 a; setsid -f sleep 305")
        _expect([i.key for i in await provider.list_ours(spec.key)], [spec.key], "list")
        await _raises(errors.SandboxCreateFailed, provider.create(spec), "the same key again")
        _require(bool(await provider.release(spec.key)), "no proof in words")
        _expect(await provider.list_ours(spec.key), [], "list after release")
        _require(not await box.alive(), "alive after release")
        await _raises(errors.SandboxLost, box.shell("true", timeout_s=_LONG_S), "shell after release")
        await _raises(errors.SandboxLost, box.run(["true"], timeout_s=_LONG_S), "run after release")
        await _raises(errors.SandboxLost, box.read(f"{box.workdir}/x"), "read after release")
        await _raises(errors.SandboxLost, provider.attach(spec, box.provider_id), "attach after release")
        await provider.release(spec.key)


async def check_the_proof_is_the_stored_authoritys(provider: SandboxProvider, new_spec: SpecFactory) -> None:
    """Release and list at the authority that is asked for; one that cannot be asked proves nothing and loses nothing."""
    spec = new_spec()
    async with _made(provider, spec) as box:
        ref = provider.ref
        for elsewhere in ("nowhere", f"not-{ref}", f"{ref}/not"):
            await _raises(
                errors.SandboxLost, provider.release(spec.key, elsewhere), f"release at {elsewhere}"
            )
            await _raises(errors.SandboxLost, provider.list_ours(spec.key, elsewhere), f"list at {elsewhere}")
        _require(await box.alive(), "a release at another authority ended the sandbox")
        _expect([i.key for i in await provider.list_ours(spec.key, ref)], [spec.key], "list")
        _require(bool(await provider.release(spec.key, ref)), "no proof in words")
        _expect(await provider.list_ours(spec.key, ref), [], "list after release")


async def _raises(kind: type[Exception], call: Awaitable[object], what: str) -> None:
    try:
        result = await call
    except kind:
        return
    raise AssertionError(f"{what}: expected {kind.__name__}, got {result!r}")


def _nap(box: Sandbox) -> str:
    """Return five minutes in seconds, with a fraction that no other sandbox of this machine sleeps for."""
    return f"300.{zlib.crc32(box.provider_id.encode())}"


async def _sleepers(box: Sandbox) -> int:
    """Count the live `sleep` processes of the sandbox's own nap that a program in it can see."""
    script = (
        "n=0; for p in /proc/[0-9]*; do IFS= read -r -d '' a < $p/cmdline && [ \"$a\" = sleep ] "
        f"&& tr '\\0' ' ' < $p/cmdline | grep -qF 'sleep {_nap(box)} ' && n=$((n+1)); done 2>/dev/null; echo $n"
    )
    return int(await _say(box, script))


async def _appears(box: Sandbox, pattern: str) -> None:
    script = f"until compgen -G '{pattern}' >/dev/null; do read -t 0.01 <> <(:); done; exit 0"
    result = await box.run(["bash", "-c", script], timeout_s=_PROMPT_S)
    _expect(result.exit_code, 0, f"waiting for {pattern}")


CHECKS: tuple[Check, ...] = (
    check_a_prepared_repository_has_one_commit,
    check_the_session_keeps_directory_and_variables,
    check_hard_commands_give_sane_results,
    check_a_background_child_does_not_hold_up_its_command,
    check_a_timeout_kills_everything_and_the_session_starts_anew,
    check_cancelling_kills_what_the_call_started,
    check_a_program_leaves_nothing_running,
    check_arguments_and_variables_arrive_unchanged,
    check_output_is_capped_at_head_and_tail,
    check_files_round_trip,
    check_links_lead_nowhere_but_inside,
    check_the_private_directory_is_private,
    check_stop_ends_every_process_and_keeps_files,
    check_attaching_finds_the_same_files,
    check_release_is_proof_and_repeatable,
    check_the_proof_is_the_stored_authoritys,
)
"""Every check; parametrise a test over it."""
