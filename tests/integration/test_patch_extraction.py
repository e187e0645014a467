from __future__ import annotations

import asyncio
import hashlib
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from orchestrator import errors
from orchestrator.grading.extract import take_patch
from orchestrator.sandbox import repository
from orchestrator.sandbox.base import Role, SandboxSpec
from orchestrator.sandbox.local import LocalProvider
from orchestrator.settings import SandboxSettings
from orchestrator.tasks.record import DatasetKind, RepoSource, Task

if TYPE_CHECKING:
    from orchestrator.sandbox.local_sandbox import LocalSandbox

BASE: dict[str, bytes] = {
    "a.py": b"x = 1\n",
    "dos.txt": b"one\r\ntwo\r\nthree\r\n",
    "run.bat": b"echo one\r\n",
    ".gitattributes": b"*.bat text eol=crlf\n",
    ".gitignore": b"*.log\nbuild/\n!keep.log\n",
    "pkg/b.py": b"y = 1\n",
    "pkg/data.bin": bytes(range(256)),
    "old/gone.py": b"z = 1\n",
    "run.sh": b"#!/bin/sh\n",
}
ENV = {
    "PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/nonexistent", "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_AUTHOR_NAME": "t", "GIT_AUTHOR_EMAIL": "t@t", "GIT_COMMITTER_NAME": "t", "GIT_COMMITTER_EMAIL": "t@t",
}  # fmt: skip


def git(folder: Path, *arguments: str, data: bytes | None = None) -> bytes:
    return subprocess.run(
        ["git", *arguments], cwd=folder, env=ENV, check=True, capture_output=True, input=data
    ).stdout


def fill(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def contents(folder: Path) -> dict[str, tuple[str, bytes]]:
    """Every file and link but `.git`, with what matters to git."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if ".git" in path.relative_to(folder).parts:
            continue
        if path.is_symlink():
            found[name] = ("link", str(path.readlink()).encode())
        elif path.is_file():
            found[name] = ("program" if path.stat().st_mode & 0o100 else "file", path.read_bytes())
    return found


class Workshop:
    """A task sandbox whose agent is a few lines of shell, and a clone to try its patch on."""

    def __init__(self, folder: Path, provider: LocalProvider) -> None:
        self.folder = folder
        self.provider = provider
        self.count = 0
        self.sandboxes: list[LocalSandbox] = []

    async def open(self, files: dict[str, bytes] = BASE, **changes):
        self.count += 1
        tree = fill(self.folder / f"tree{self.count}", files)
        task = Task(
            instance_id="t", dataset_kind=DatasetKind.LOCAL, workdir="/testbed", problem_statement="x",
            repo_source=changes.pop("repo_source", RepoSource(kind="tree", path=tree)), **changes,
        )  # fmt: skip
        spec = SandboxSpec(key=f"k{self.count}", role=Role.TASK, task=task)
        self.sandboxes.append(await self.provider.create(spec))
        return self.sandboxes[-1]

    async def patch_of(self, commands: str, files: dict[str, bytes] = BASE):
        """Let an agent run the commands; return its sandbox and its patch."""
        sandbox = await self.open(files)
        base = await repository.hide_git(sandbox)
        result = await sandbox.shell(f"set -e\n{commands}", timeout_s=30)
        assert result.exit_code == 0, result.output
        return sandbox, await take(sandbox, base)

    def apply(self, data: bytes, files: dict[str, bytes] = BASE) -> Path:
        """Return a fresh repository with the same base and the patch applied by plain git."""
        self.count += 1
        clone = fill(self.folder / f"clone{self.count}", files)
        git(clone, "init", "-q")
        (clone / ".git/info/attributes").write_text("* -text\n")
        git(clone, "add", "-A", "-f")
        git(clone, "commit", "-qm", "base")
        git(clone, "apply", "--whitespace=nowarn", data=data)
        return clone


def work(sandbox) -> Path:
    return Path(sandbox.provider_id) / "work"


async def take(sandbox, base: str, limit_bytes: int = 5_000_000, timeout_s: float = 60):
    _, patch = await take_patch(sandbox, base_commit=base, limit_bytes=limit_bytes, timeout_s=timeout_s)
    return patch


@pytest.fixture(scope="module")
def provider(tmp_path_factory):
    folder = tmp_path_factory.mktemp("provider")
    settings = SandboxSettings(root=folder / "sandboxes", python=Path(sys.executable))
    return LocalProvider(settings, cache_dir=folder / "cache")


@pytest.fixture
async def workshop(tmp_path, provider):
    opened = Workshop(tmp_path, provider)
    yield opened
    for sandbox in opened.sandboxes:
        await sandbox.detach()
        await provider.release(sandbox.key)


async def test_an_untouched_tree_gives_an_empty_patch(workshop):
    sandbox = await workshop.open()
    base = await repository.hide_git(sandbox)
    value, patch = await take_patch(sandbox, base_commit=base, limit_bytes=10, timeout_s=60)
    assert (value, patch.data, patch.paths) == ("empty", b"", [])


async def test_a_hostile_work_tree_is_reproduced_byte_for_byte_by_its_patch(workshop):
    sandbox, patch = await workshop.patch_of(r"""
        echo 'x = 2' > a.py; printf 'one\r\n2\r\nthree\r\n' > dos.txt; rm -r old; chmod +x run.sh
        printf '\001\000\377' >> pkg/data.bin; head -c 3000 /dev/zero > zeros; printf 'no newline' > end.txt
        ln -s /etc/passwd link; ln -s missing dangling; rm pkg/b.py; mkdir pkg/b.py; echo in > pkg/b.py/in
        printf 1 > $'new\nline \377 "q"\t.txt'; printf 1 > ':(top)x'; printf 1 > '-rf'; mkdir 'b [x]'; echo > 'b [x]/*'
        mkfifo pipe; printf '*.py -diff\n*.txt text eol=lf filter=x ident\n' > .gitattributes
        printf '\xff\xfe\x41\x00\r\n' > utf16.txt; echo '$Id$' > ident.txt; echo '*' > pkg/.gitignore
    """)
    clone = workshop.apply(patch.data)
    assert contents(clone) == contents(work(sandbox))
    assert b"Binary files" not in patch.data
    assert "special file left out: pipe" in patch.notes
    assert patch.sha256 == hashlib.sha256(patch.data).hexdigest()
    assert {"a.py", "old/gone.py", "pkg/b.py", "pkg/b.py/in", "-rf"} <= set(patch.paths)


async def test_what_the_agent_does_to_repositories_and_settings_changes_nothing(workshop):
    _, plain = await workshop.patch_of("echo 'x = 2' > a.py; echo new > new.py")
    _, bent = await workshop.patch_of(r"""
        echo 'x = 2' > a.py; echo new > new.py
        git init -q . ; git config user.email a@a; git config user.name a
        printf '#!/bin/sh\ntouch /tmp/ran\n' > /tmp/hook; chmod +x /tmp/hook
        git config core.fsmonitor /tmp/hook; git config diff.external /tmp/hook
        git config diff.noprefix true; git config color.ui always; git config core.autocrlf true
        mkdir -p ~/.config/git; printf '[diff]\nnoprefix=true\nexternal=touch /tmp/ran\n' > ~/.gitconfig
        printf 'new.py\n' > ~/.config/git/ignore; printf '* -diff\n' > ~/.config/git/attributes
        mkdir -p .git/hooks; cp /tmp/hook .git/hooks/post-index-change
        git add -A; git -c core.fsmonitor=false commit -qm mine; git update-index --assume-unchanged a.py
        rm -f /tmp/ran
    """)
    assert bent.data == plain.data
    assert bent.paths == ["a.py", "new.py"]


async def test_nothing_the_agent_set_up_is_executed(workshop):
    sandbox, _ = await workshop.patch_of(r"""
        git init -q .; git config core.fsmonitor "touch /tmp/ran"; printf '* filter=f diff=d\n' > .gitattributes
        printf '[filter "f"]\nclean = touch /tmp/ran\n[diff "d"]\ntextconv = touch /tmp/ran\n' > ~/.gitconfig
        echo 'touch /tmp/ran' > ~/.bashrc; cp ~/.bashrc ~/.bash_profile; cp ~/.gitconfig .git/config; echo > a.py
    """)
    assert not (Path(sandbox.provider_id) / "tmp/ran").exists()


async def test_an_edit_of_equal_size_with_the_old_time_is_seen(workshop):
    _, patch = await workshop.patch_of("touch -r a.py /tmp/t; echo 'x = 2' > a.py; touch -r /tmp/t a.py")
    assert patch.paths == ["a.py"]


async def test_line_ends_that_attributes_would_convert_are_no_change(workshop, tmp_path):
    source = fill(tmp_path / "source", BASE | {"run.bat": b"echo one\n"})
    git(source, "init", "-q")
    git(source, "add", "-A")
    git(source, "commit", "-qm", "base")
    sandbox = await workshop.open(repo_source=RepoSource(kind="git", path=source))
    base = await repository.hide_git(sandbox)
    assert (work(sandbox) / "run.bat").read_bytes() == b"echo one\r\n"
    await sandbox.shell("printf 'echo two\\r\\n' >> run.bat", timeout_s=10)
    patch = await take(sandbox, base)
    assert (patch.insertions, patch.deletions) == (1, 0)


async def test_ignore_rules_come_from_the_base_alone_and_what_they_drop_is_noted(workshop):
    _, patch = await workshop.patch_of(r"""
        printf '*\n' > .gitignore; echo new > new.py; echo l > x.log; echo k > keep.log; mkdir build; echo b > build/b
        python3 -c 'import pkg.b'
    """)
    assert patch.paths == [".gitignore", "keep.log", "new.py"]
    dropped = {
        note.split(": ")[1] for note in patch.notes if note.startswith("ignored by the base, left out: ")
    }
    assert {"x.log", "build/b"} < dropped
    assert any(name.startswith("pkg/__pycache__/") for name in dropped)


async def test_unreadable_files_and_folders_are_read_and_noted(workshop):
    _, patch = await workshop.patch_of(
        "echo 'x = 2' > a.py; mkdir d; echo n > d/n.py; chmod 0 a.py d/n.py; chmod 0 d"
    )
    assert patch.paths == ["a.py", "d/n.py"]
    assert {"made readable: a.py", "made readable: d", "made readable: d/n.py"} <= set(patch.notes)


async def test_a_repository_inside_swallows_no_file(workshop):
    commit = "git init -q {0}; cd {0}; git config user.email a@a; git config user.name a; git add -A; git commit -qm m; cd ~-"
    sandbox, patch = await workshop.patch_of(
        f"mkdir sub; echo s > sub/s.py; {commit.format('sub')}; echo 'y = 2' > pkg/b.py; {commit.format('pkg')}"
    )
    assert patch.paths == ["pkg/b.py", "sub/s.py"]
    assert any(note.endswith(": sub/.git") for note in patch.notes)
    assert contents(workshop.apply(patch.data)) == contents(work(sandbox))


async def test_an_edit_inside_a_submodule_is_captured(workshop, tmp_path):
    inner = fill(tmp_path / "inner", {"lib.py": b"lib = 1\n"})
    outer = fill(tmp_path / "outer", {"a.py": b"x = 1\n"})
    for folder in (inner, outer):
        git(folder, "init", "-q")
        git(folder, "add", "-A")
        git(folder, "commit", "-qm", "base")
    git(outer, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(inner), "vendor")
    git(outer, "commit", "-qm", "submodule")
    commands = "mkdir -p vendor && echo 'lib = 1' > vendor/lib.py"
    source = RepoSource(kind="git", path=outer)
    try:
        sandbox = await workshop.open(repo_source=source, pre_commands=commands)
    except errors.TaskInvalid as refusal:
        pytest.skip(f"this provider serves no submodules: {refusal}")
    base = await repository.hide_git(sandbox)
    await sandbox.shell("echo 'lib = 2' > vendor/lib.py", timeout_s=10)
    patch = await take(sandbox, base)
    assert patch.paths == ["vendor/lib.py"]


async def test_a_patch_over_the_limit_is_refused_with_sizes_and_names(workshop):
    sandbox = await workshop.open()
    base = await repository.hide_git(sandbox)
    await sandbox.shell("head -c 50000000 /dev/urandom > junk.bin; echo 'x = 2' > a.py", timeout_s=30)
    with pytest.raises(errors.ExtractFailed, match=r"50000000 bytes: junk\.bin") as caught:
        await take(sandbox, base)
    assert caught.value.value == "patch_too_large"
    await sandbox.shell("truncate -s 900M junk.bin", timeout_s=30)
    with pytest.raises(errors.ExtractFailed, match=r"bytes: junk\.bin") as caught:
        await take(sandbox, base)
    assert caught.value.value == "patch_too_large"
    await sandbox.shell("rm junk.bin", timeout_s=10)
    patch = await take(sandbox, base)
    assert len(patch.data) == len((await take(sandbox, base, limit_bytes=len(patch.data))).data)
    with pytest.raises(errors.ExtractFailed):
        await take(sandbox, base, limit_bytes=len(patch.data) - 1)


async def test_a_file_git_cannot_hold_makes_the_extraction_incomplete_and_is_named(workshop):
    sandbox = await workshop.open()
    base = await repository.hide_git(sandbox)
    await sandbox.shell("echo 'x = 2' > a.py; mkdir -p d/.GIT; echo > d/.GIT/config", timeout_s=10)
    with pytest.raises(errors.ExtractFailed, match=r"d/\.GIT/config") as caught:
        await take(sandbox, base)
    assert caught.value.value == "extract_incomplete"


async def test_an_extraction_over_its_time_is_no_patch(workshop):
    sandbox = await workshop.open()
    base = await repository.hide_git(sandbox)
    with pytest.raises(errors.ExtractFailed) as caught:
        await take(sandbox, base, timeout_s=0.01)
    assert caught.value.value == "extract_timeout"


async def test_a_byte_altered_on_the_way_is_noticed(workshop):
    sandbox = await workshop.open()
    base = await repository.hide_git(sandbox)
    await sandbox.shell("echo 'x = 2' > a.py", timeout_s=10)
    read = sandbox.read

    async def read_with_noise(path, *, limit=1 << 26):
        data = await read(path, limit=limit)
        return data.replace(b"2", b"3") if path.endswith("/patch") else data

    sandbox.read = read_with_noise  # the wire, not our code
    with pytest.raises(errors.ExtractFailed, match="changed on its way") as caught:
        await take(sandbox, base)
    assert caught.value.value == "extract_failed"


async def test_without_a_pristine_copy_there_is_no_patch(workshop):
    sandbox = await workshop.open()
    with pytest.raises(errors.ExtractFailed, match="no pristine repository was kept"):
        await take(sandbox, sandbox.base_commit)
    with pytest.raises(errors.SandboxLost):
        await repository.restore_git(sandbox)


async def test_another_base_than_the_kept_one_gives_no_patch(workshop):
    sandbox = await workshop.open()
    await repository.keep_pristine(sandbox)
    with pytest.raises(errors.ExtractFailed, match="the kept base is"):
        await take(sandbox, "0" * 40)


async def test_processes_of_the_agent_are_gone_before_the_patch_is_taken(workshop):
    sandbox = await workshop.open()
    base = await repository.hide_git(sandbox)
    await sandbox.shell("setsid sh -c 'while :; do date +%s%N > a.py; done' > /dev/null 2>&1 &", timeout_s=10)
    first = await take(sandbox, base)
    assert first.data == (await take(sandbox, base)).data


async def test_git_is_hidden_from_the_agent_and_comes_back_as_it_was(workshop):
    sandbox = await workshop.open()
    before = contents(work(sandbox) / ".git")
    base = await repository.hide_git(sandbox)
    assert base == sandbox.base_commit
    assert not (work(sandbox) / ".git").exists()
    seen = await sandbox.shell(
        f"git log; ls -a {sandbox.private_dir}; find /private /tmp /home /testbed -name pristine.git",
        timeout_s=30,
    )
    assert b"base" not in seen.output
    assert b"\npristine.git" not in seen.output
    assert await repository.restore_git(sandbox) == base
    assert contents(work(sandbox) / ".git") == before


@pytest.mark.parametrize(
    "left",
    ["git init -q .; echo bad > .git/config", "echo 'gitdir: /tmp/x' > .git", "ln -s /tmp .git", "mkdir -p .git/x; chmod 0 .git/x .git"],
    ids=["a repository", "a file", "a link", "an unreadable folder"],
)  # fmt: skip
async def test_whatever_the_agent_left_at_git_is_replaced(workshop, left):
    sandbox = await workshop.open()
    before = contents(work(sandbox) / ".git")
    base = await repository.hide_git(sandbox)
    await sandbox.shell(f"touch /tmp/mine; {left}", timeout_s=10)
    for _ in range(2):
        assert await repository.restore_git(sandbox) == base
        assert contents(work(sandbox) / ".git") == before
    assert (Path(sandbox.provider_id) / "tmp/mine").exists()


async def test_hiding_goes_on_after_a_crash_between_its_steps(workshop):
    sandbox = await workshop.open()
    before = contents(work(sandbox) / ".git")
    private = Path(sandbox.provider_id) / "private"
    (private / "pristine.git").mkdir()  # a copy that was cut short
    base = await repository.keep_pristine(sandbox)  # the copy is made, and then the worker dies
    assert await repository.hide_git(sandbox) == base
    assert await repository.hide_git(sandbox) == base
    assert not (work(sandbox) / ".git").exists()
    (work(sandbox) / ".git").mkdir()  # restoring was cut short
    assert await repository.restore_git(sandbox) == base
    assert contents(work(sandbox) / ".git") == before


async def test_a_patch_is_the_same_whether_git_was_hidden_restored_or_never_hidden(workshop):
    sandbox = await workshop.open()
    base = await repository.keep_pristine(sandbox)
    await sandbox.shell(
        "echo 'x = 2' > a.py; git add -A; git -c user.name=a -c user.email=a commit -qm fix", timeout_s=10
    )
    shown = await take(sandbox, base)
    await repository.restore_git(sandbox)
    restored = await take(sandbox, base)
    await repository.hide_git(sandbox)
    hidden = await take(sandbox, base)
    assert shown.data == restored.data == hidden.data != b""


@pytest.mark.parametrize(
    "extra",
    [
        "git commit -q --allow-empty -m future",
        "git checkout -q -b other; git commit -q --allow-empty -m future; git checkout -q main",
        "git commit -q --allow-empty -m future; git reset -q --hard HEAD~1",
        "git commit -q --allow-empty -m f; git reset -q --hard HEAD~1; git reflog expire --expire=now --all",
        "git tag v9 HEAD",
    ],
    ids=["a second commit", "a branch", "a reflog", "an unreachable commit", "a tag object's name"],
)
async def test_history_beyond_one_commit_is_refused(workshop, extra):
    sandbox = await workshop.open()
    script = (
        f"export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a; {extra}"
    )
    result = await sandbox.run(["bash", "-ec", script], timeout_s=30)
    assert result.exit_code == 0, result.output
    with pytest.raises(errors.SandboxCreateFailed, match="more than one|unreachable"):
        await repository.hide_git(sandbox)


async def test_no_future_of_the_source_repository_reaches_the_sandbox(workshop, tmp_path):
    source = fill(tmp_path / "source", BASE)
    git(source, "init", "-q", "-b", "main")
    git(source, "add", "-A")
    git(source, "commit", "-qm", "base")
    base = git(source, "rev-parse", "HEAD").decode().strip()
    fill(source, {"a.py": b"x = 'the secret fix'\n"})
    git(source, "commit", "-qam", "fix")
    fix = git(source, "rev-parse", "HEAD").decode().strip()
    git(source, "tag", "v2")
    git(source, "branch", "other")
    git(source, "reset", "-q", "--hard", base)
    sandbox = await workshop.open(repo_source=RepoSource(kind="git", path=source), base_commit=base)
    await repository.keep_pristine(sandbox)
    shown = await sandbox.shell(
        f"git log --all --oneline; git tag; git branch -a; git cat-file -t {fix}", timeout_s=30
    )
    assert shown.output.count(b" base") == 1
    assert b"v2" not in shown.output
    assert b"commit\n" not in shown.output


async def test_cancelling_an_extraction_passes_through(workshop):
    sandbox = await workshop.open()
    base = await repository.hide_git(sandbox)
    task = asyncio.create_task(take(sandbox, base))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await take(sandbox, base)).data == b""


async def test_a_sandbox_that_is_gone_is_lost_not_empty(workshop):
    sandbox = await workshop.open()
    base = await repository.hide_git(sandbox)
    await workshop.provider.release(sandbox.key)
    with pytest.raises(errors.SandboxLost):
        await take(sandbox, base)
