"""The repository a task starts from: exactly its base tree, one commit, and nothing that leaks the fix."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator import errors
from orchestrator.sandbox.base import Role, SandboxSpec
from orchestrator.sandbox.local import LocalProvider
from orchestrator.settings import SandboxSettings
from orchestrator.tasks.record import DatasetKind, RepoSource, Task

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.sandbox.local_sandbox import LocalSandbox

ENV = {
    "PATH": os.defpath,
    "GIT_CONFIG_GLOBAL": "/dev/null",
    **{
        f"GIT_{who}_{what}": "someone@example.org"
        for who in ("AUTHOR", "COMMITTER")
        for what in ("NAME", "EMAIL")
    },
}


@pytest.fixture
async def provider(tmp_path):
    settings = SandboxSettings(root=tmp_path / "boxes", python=Path(sys.executable), allow_no_isolation=True)
    made = LocalProvider(settings, cache_dir=tmp_path / "cache")
    yield made
    assert await made.list_ours("") == []


@pytest.fixture
def make_box(provider, request):
    async def make(source: RepoSource | None, **fields: Any) -> LocalSandbox:
        record: dict[str, Any] = {
            "instance_id": "demo__demo-1",
            "workdir": "/workspace/demo",
            "problem_statement": "x",
            **fields,
        }
        task = Task(dataset_kind=DatasetKind.LOCAL, repo_source=source, **record)
        spec = SandboxSpec(key=f"workspace-{os.getpid()}-{len(made)}", role=Role.TASK, task=task)
        made.append(spec.key)
        box: LocalSandbox = await provider.create(spec)
        return box

    made: list[str] = []
    return make, made


@pytest.fixture
async def box_of(make_box, provider):
    make, made = make_box
    yield make
    for key in made:
        await provider.release(key)


async def say(box: LocalSandbox, command: str) -> str:
    return (await box.shell(command, timeout_s=30)).output.decode().strip()


def git(folder: Path, *arguments: str, env: dict[str, str] = ENV) -> str:
    call = subprocess.run(
        ["git", "-C", folder, *arguments], check=True, capture_output=True, text=True, env=env
    )
    return call.stdout.strip()


def archive_of(path: Path, members: Sequence[tuple[str | tarfile.TarInfo, bytes]]) -> RepoSource:
    with tarfile.open(path, "w:gz") as archive:
        for member, data in members:
            info = member if isinstance(member, tarfile.TarInfo) else tarfile.TarInfo(member)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return RepoSource(kind="archive", path=path, sha256=hashlib.sha256(path.read_bytes()).hexdigest())


@pytest.fixture
def history(tmp_path):
    """A repository with a past, a future that holds the fix, a branch, a tag, a stash and an ignored file."""
    repo = tmp_path / "upstream"
    repo.mkdir()
    git(repo, "init", "-q", "-b", "main")
    (repo / "a.py").write_text("bug\n")
    (repo / "old.py").write_text("gone later\n")
    git(repo, "add", "-A")
    git(repo, "commit", "-qm", "past")
    (repo / "old.py").unlink()
    (repo / ".gitignore").write_text("*.log\n")
    (repo / ".gitattributes").write_text("docs export-ignore\n*.txt text eol=crlf\n")
    (repo / "docs").mkdir()
    (repo / "docs" / "kept.log").write_text("tracked although ignored\n")
    (repo / "lines.txt").write_bytes(b"one\r\n")
    (repo / "run").write_text("#!/bin/sh\n")
    (repo / "run").chmod(0o755)
    (repo / "link").symlink_to("a.py")
    git(repo, "add", "-A", "-f")
    git(repo, "commit", "-qm", "base")
    base = git(repo, "rev-parse", "HEAD")
    (repo / "a.py").write_text("fixed\n")
    git(repo, "commit", "-qam", "the fix")
    git(repo, "tag", "v2")
    git(repo, "branch", "future")
    return repo, base


async def test_a_repository_gives_exactly_the_tree_of_its_base_commit(box_of, history):
    repo, base = history
    box = await box_of(RepoSource(kind="git", path=repo), base_commit=base)
    assert await say(box, "git rev-parse HEAD^{tree}") == git(repo, "rev-parse", f"{base}^{{tree}}")
    assert await say(box, "git rev-parse HEAD") == box.base_commit
    assert await say(
        box, "git status --porcelain; cat a.py docs/kept.log; readlink link; test -x run && echo x"
    ) == ("bug\ntracked although ignored\na.py\nx")


async def test_nothing_of_the_past_or_the_future_is_reachable(box_of, history):
    repo, base = history
    box = await box_of(RepoSource(kind="git", path=repo), base_commit=base)
    for name in (base, "v2", "future", git(repo, "rev-parse", "v2"), git(repo, "rev-parse", "v2:a.py")):
        assert (await box.shell(f"git cat-file -e {name}", timeout_s=30)).exit_code != 0, name
    assert await say(box, "git log --all --reflog --format='%an <%ae> %aI %cI %s'") == (
        "t <t@t> 2000-01-01T00:00:00Z 2000-01-01T00:00:00Z base"
    ).replace("Z", "+00:00")
    assert (
        await say(box, "ls .git/hooks .git/logs 2>/dev/null; git remote; git fsck --unreachable --no-reflogs")
        == ""
    )
    assert str(repo) not in await say(box, "grep -r upstream .git; find .git -name alternates")


async def test_the_same_tree_gives_the_same_commit_from_every_kind_of_source(box_of, history, tmp_path):
    repo, base = history
    git(repo, "checkout", "-q", base)
    members: list[tuple[str | tarfile.TarInfo, bytes]] = []
    for path in sorted(repo.rglob("*")):
        inner = path.relative_to(repo)
        if path.is_dir() or inner.parts[0] == ".git":
            continue
        info = tarfile.TarInfo(str(inner))
        if path.is_symlink():
            info.type, info.linkname, data = tarfile.SYMTYPE, str(path.readlink()), b""
        else:
            info.mode, data = path.stat().st_mode & 0o777, path.read_bytes()
        members.append((info, data))
    boxes = [
        await box_of(RepoSource(kind="git", path=repo), base_commit=base),
        await box_of(RepoSource(kind="tree", path=repo)),
        await box_of(archive_of(tmp_path / "repo.tar.gz", members)),
    ]
    trees = [await say(box, "git rev-parse HEAD^{tree}") for box in boxes]
    assert len(set(trees)) == 1
    assert len({box.base_commit for box in boxes}) == 1


async def test_a_known_archive_makes_the_commit_git_makes_of_it(box_of, tmp_path):
    tree = tmp_path / "plain"
    tree.mkdir()
    (tree / "a.py").write_text("x\n")
    git(tree, "init", "-q", "-b", "main")
    git(tree, "add", "-A")
    dated = {**ENV, **{f"GIT_{who}_DATE": "2000-01-01T00:00:00Z" for who in ("AUTHOR", "COMMITTER")}}
    dated |= {
        f"GIT_{who}_{what}": value
        for who in ("AUTHOR", "COMMITTER")
        for what, value in (("NAME", "t"), ("EMAIL", "t@t"))
    }
    git(tree, "commit", "-qm", "base", env=dated)
    expected = git(tree, "rev-parse", "HEAD")
    source = archive_of(tmp_path / "repo.tar.gz", [("a.py", b"x\n")])
    assert (await box_of(source, base_commit=expected)).base_commit == expected


async def test_a_base_commit_made_without_ignored_files_is_accepted(box_of, tmp_path):
    members = [("a.py", b"x\n"), (".gitignore", b"*.log\n"), ("b.log", b"left out\n")]
    everything = await box_of(archive_of(tmp_path / "1.tar.gz", members))
    assert await say(everything, "git ls-files") == ".gitignore\na.py\nb.log"
    unignored = await box_of(archive_of(tmp_path / "2.tar.gz", members[:2]))
    again = await box_of(archive_of(tmp_path / "3.tar.gz", members), base_commit=unignored.base_commit)
    assert again.base_commit == unignored.base_commit


async def test_a_wrong_base_commit_names_the_instance_and_the_commit(box_of, history, tmp_path):
    wrong = "0123456789" * 4
    for source in (RepoSource(kind="git", path=history[0]), archive_of(tmp_path / "a.tar.gz", [("a", b"")])):
        with pytest.raises(errors.TaskInvalid) as caught:
            await box_of(source, base_commit=wrong)
        assert "demo__demo-1" in str(caught.value)
        assert wrong in str(caught.value)


async def test_a_record_with_an_image_only_says_what_it_needs(box_of):
    with pytest.raises(errors.TaskInvalid, match="names only the container image example/img:1") as caught:
        await box_of(None, image="example/img:1")
    assert "--sandbox aenv" in caught.value.hint


@pytest.mark.parametrize(
    "workdir", ["/", "/usr", "/usr/src/x", "/proc/x", "/home/agent", "/private/x", "/a/../b", "/tmp"]
)
async def test_a_workdir_over_the_sandbox_itself_is_refused(box_of, tmp_path, workdir):
    with pytest.raises(errors.TaskInvalid, match="workdir"):
        await box_of(archive_of(tmp_path / "a.tar.gz", [("a", b"")]), workdir=workdir)


@pytest.mark.parametrize("workdir", ["/testbed", "/app", "/workspace/a b", "/tmp/repo", "/click"])
async def test_the_repository_lies_where_the_record_says(box_of, tmp_path, workdir):
    box = await box_of(archive_of(tmp_path / "a.tar.gz", [("a", b"")]), workdir=workdir)
    if box.isolation != "none":
        assert await say(box, "pwd") == workdir


def hostile(kind: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo("evil")
    info.type = {"link": tarfile.SYMTYPE, "hard": tarfile.LNKTYPE, "device": tarfile.CHRTYPE}.get(
        kind, tarfile.REGTYPE
    )
    info.linkname = {"link": "/etc", "hard": "../../../etc/passwd"}.get(kind, "")
    info.name = "../evil" if kind == "parent" else "evil"
    return info


@pytest.mark.parametrize("kind", ["link", "hard", "device", "parent"])
async def test_an_archive_that_reaches_out_of_its_tree_is_refused(box_of, tmp_path, kind):
    with pytest.raises(errors.TaskInvalid, match="cannot be unpacked"):
        await box_of(archive_of(tmp_path / "a.tar.gz", [("a", b""), (hostile(kind), b"")]))
    assert list(tmp_path.rglob("evil")) == []


async def test_a_repository_hidden_in_an_archive_is_left_out(box_of, tmp_path):
    members: list[tuple[str | tarfile.TarInfo, bytes]] = [("a", b""), ("vendor/b", b"")]
    for folder in (".git", "vendor/.git", "vendor/.GIT"):
        hook = tarfile.TarInfo(f"{folder}/hooks/post-commit")
        hook.mode = 0o755
        members += [(hook, b"#!/bin/sh\ntouch /tmp/ran\n"), (f"{folder}/HEAD", b"ref: refs/heads/main\n")]
    box = await box_of(archive_of(tmp_path / "a.tar.gz", members))
    assert await say(box, "find . -iname post-commit; find /tmp -name ran; git ls-files") == "a\nvendor/b"


async def test_a_damaged_or_changed_archive_is_refused(box_of, tmp_path):
    source = archive_of(tmp_path / "a.tar.gz", [("a", b"x" * 5000)])
    with source.path.open("ab") as file:
        file.write(b"more")
    with pytest.raises(errors.TaskInvalid, match="sha256"):
        await box_of(source)
    source.path.write_bytes(b"no archive")
    with pytest.raises(errors.TaskInvalid, match="cannot be unpacked"):
        await box_of(source.model_copy(update={"sha256": None}))
    source.path.unlink()
    with pytest.raises(errors.TaskInvalid, match="does not exist"):
        await box_of(source)


async def test_what_pre_commands_change_belongs_to_the_base(box_of, tmp_path):
    source = archive_of(tmp_path / "a.tar.gz", [("a.py", b"x\n"), (".gitignore", b"build\n")])
    plain = await box_of(source)
    changed = [
        await box_of(source, pre_commands="mkdir build && echo 1 > build/x; rm a.py; cd /") for _ in range(2)
    ]
    for box in changed:
        assert await say(
            box, "git status --porcelain --ignored; git ls-files; git rev-list --all --count"
        ) == (".gitignore\nbuild/x\n1")
        assert box.base_commit == await say(box, "git rev-parse HEAD")
    assert changed[0].base_commit == changed[1].base_commit != plain.base_commit
    untouched = await box_of(source, pre_commands="true", base_commit=plain.base_commit)
    assert untouched.base_commit == plain.base_commit


async def test_failing_pre_commands_show_the_end_of_their_output(box_of, tmp_path):
    source = archive_of(tmp_path / "a.tar.gz", [("a.py", b"x\n")])
    with pytest.raises(
        errors.TaskInvalid, match=r"demo__demo-1: pre_commands ended with exit code 4: .*boom"
    ):
        await box_of(source, pre_commands="echo boom; exit 4")


async def test_the_users_git_configuration_takes_no_part(box_of, tmp_path, monkeypatch):
    home = tmp_path / "home"
    (home / "hooks").mkdir(parents=True)
    (home / "hooks" / "post-commit").write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    (home / "hooks" / "post-commit").chmod(0o755)
    (home / ".gitconfig").write_text(f"[core]\nhooksPath={home}/hooks\nautocrlf=true\n[user]\nname=other\n")
    monkeypatch.setenv("HOME", str(home))
    box = await box_of(archive_of(tmp_path / "a.tar.gz", [("a.py", b"x\r\n")]))
    assert not (tmp_path / "ran").exists()
    assert (
        await say(box, "git cat-file blob HEAD:a.py | od -c | head -1; git log --format=%an")
        == "0000000   x  \\r  \\n\nt"
    )
