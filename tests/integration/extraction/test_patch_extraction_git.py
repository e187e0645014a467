from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator import errors
from orchestrator.sandbox import repository
from orchestrator.tasks.record import RepoSource


async def test_git_is_hidden_from_the_agent_and_comes_back_as_it_was(workshop):
    sandbox = await workshop.open()
    before = workshop.contents(workshop.work(sandbox) / ".git")
    base = await repository.hide_git(sandbox)
    assert base == sandbox.base_commit
    assert not (workshop.work(sandbox) / ".git").exists()
    seen = await sandbox.shell(
        f"git log; ls -a {sandbox.private_dir}; find /private /tmp /home /testbed -name pristine.git",
        timeout_s=30,
    )
    assert b"base" not in seen.output
    assert b"\npristine.git" not in seen.output
    assert await repository.restore_git(sandbox) == base
    assert workshop.contents(workshop.work(sandbox) / ".git") == before


@pytest.mark.parametrize(
    "left",
    ["git init -q .; echo bad > .git/config", "echo 'gitdir: /tmp/x' > .git", "ln -s /tmp .git", "mkdir -p .git/x; chmod 0 .git/x .git"],
    ids=["a repository", "a file", "a link", "an unreadable folder"],
)  # fmt: skip
async def test_whatever_the_agent_left_at_git_is_replaced(workshop, left):
    sandbox = await workshop.open()
    before = workshop.contents(workshop.work(sandbox) / ".git")
    base = await repository.hide_git(sandbox)
    await sandbox.shell(f"touch /tmp/mine; {left}", timeout_s=10)
    for _ in range(2):
        assert await repository.restore_git(sandbox) == base
        assert workshop.contents(workshop.work(sandbox) / ".git") == before
    assert (Path(sandbox.provider_id) / "tmp/mine").exists()


async def test_hiding_goes_on_after_a_crash_between_its_steps(workshop):
    sandbox = await workshop.open()
    before = workshop.contents(workshop.work(sandbox) / ".git")
    private = Path(sandbox.provider_id) / "private"
    (private / "pristine.git").mkdir()  # a copy that was cut short
    base = await repository.keep_pristine(sandbox)  # the copy is made, and then the worker dies
    assert await repository.hide_git(sandbox) == base
    assert await repository.hide_git(sandbox) == base
    assert not (workshop.work(sandbox) / ".git").exists()
    (workshop.work(sandbox) / ".git").mkdir()  # restoring was cut short
    assert await repository.restore_git(sandbox) == base
    assert workshop.contents(workshop.work(sandbox) / ".git") == before


async def test_a_patch_is_the_same_whether_git_was_hidden_restored_or_never_hidden(workshop):
    sandbox = await workshop.open()
    base = await repository.keep_pristine(sandbox)
    await sandbox.shell(
        "echo 'x = 2' > a.py; git add -A; git -c user.name=a -c user.email=a commit -qm fix", timeout_s=10
    )
    shown = await workshop.take(sandbox, base)
    await repository.restore_git(sandbox)
    restored = await workshop.take(sandbox, base)
    await repository.hide_git(sandbox)
    hidden = await workshop.take(sandbox, base)
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
    source = workshop.fill(tmp_path / "source", workshop.base)
    workshop.git(source, "init", "-q", "-b", "main")
    workshop.git(source, "add", "-A")
    workshop.git(source, "commit", "-qm", "base")
    base = workshop.git(source, "rev-parse", "HEAD").decode().strip()
    workshop.fill(source, {"a.py": b"x = 'the secret fix'\n"})
    workshop.git(source, "commit", "-qam", "fix")
    fix = workshop.git(source, "rev-parse", "HEAD").decode().strip()
    workshop.git(source, "tag", "v2")
    workshop.git(source, "branch", "other")
    workshop.git(source, "reset", "-q", "--hard", base)
    sandbox = await workshop.open(repo_source=RepoSource(kind="git", path=source), base_commit=base)
    await repository.keep_pristine(sandbox)
    shown = await sandbox.shell(
        f"git log --all --oneline; git tag; git branch -a; git cat-file -t {fix}", timeout_s=30
    )
    assert shown.output.count(b" base") == 1
    assert b"v2" not in shown.output
    assert b"commit\n" not in shown.output
