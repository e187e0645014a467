from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import pytest

from orchestrator import errors
from orchestrator.grading.extract import take_patch
from orchestrator.sandbox import repository
from orchestrator.tasks.record import RepoSource


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
    assert workshop.contents(clone) == workshop.contents(workshop.work(sandbox))
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
    source = workshop.fill(tmp_path / "source", workshop.base | {"run.bat": b"echo one\n"})
    workshop.git(source, "init", "-q")
    workshop.git(source, "add", "-A")
    workshop.git(source, "commit", "-qm", "base")
    sandbox = await workshop.open(repo_source=RepoSource(kind="git", path=source))
    base = await repository.hide_git(sandbox)
    assert (workshop.work(sandbox) / "run.bat").read_bytes() == b"echo one\r\n"
    await sandbox.shell("printf 'echo two\\r\\n' >> run.bat", timeout_s=10)
    patch = await workshop.take(sandbox, base)
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
    assert workshop.contents(workshop.apply(patch.data)) == workshop.contents(workshop.work(sandbox))


async def test_an_edit_inside_a_submodule_is_captured(workshop, tmp_path):
    inner = workshop.fill(tmp_path / "inner", {"lib.py": b"lib = 1\n"})
    outer = workshop.fill(tmp_path / "outer", {"a.py": b"x = 1\n"})
    for folder in (inner, outer):
        workshop.git(folder, "init", "-q")
        workshop.git(folder, "add", "-A")
        workshop.git(folder, "commit", "-qm", "base")
    workshop.git(outer, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(inner), "vendor")
    workshop.git(outer, "commit", "-qm", "submodule")
    commands = "mkdir -p vendor && echo 'lib = 1' > vendor/lib.py"
    source = RepoSource(kind="git", path=outer)
    try:
        sandbox = await workshop.open(repo_source=source, pre_commands=commands)
    except errors.TaskInvalid as refusal:
        pytest.skip(f"this provider serves no submodules: {refusal}")
    base = await repository.hide_git(sandbox)
    await sandbox.shell("echo 'lib = 2' > vendor/lib.py", timeout_s=10)
    patch = await workshop.take(sandbox, base)
    assert patch.paths == ["vendor/lib.py"]


async def test_a_patch_over_the_limit_is_refused_with_sizes_and_names(workshop):
    sandbox = await workshop.open()
    base = await repository.hide_git(sandbox)
    await sandbox.shell("head -c 50000000 /dev/urandom > junk.bin; echo 'x = 2' > a.py", timeout_s=30)
    with pytest.raises(errors.ExtractFailed, match=r"50000000 bytes: junk\.bin") as caught:
        await workshop.take(sandbox, base)
    assert caught.value.value == "patch_too_large"
    await sandbox.shell("truncate -s 900M junk.bin", timeout_s=30)
    with pytest.raises(errors.ExtractFailed, match=r"bytes: junk\.bin") as caught:
        await workshop.take(sandbox, base)
    assert caught.value.value == "patch_too_large"
    await sandbox.shell("rm junk.bin", timeout_s=10)
    patch = await workshop.take(sandbox, base)
    assert len(patch.data) == len((await workshop.take(sandbox, base, limit_bytes=len(patch.data))).data)
    with pytest.raises(errors.ExtractFailed):
        await workshop.take(sandbox, base, limit_bytes=len(patch.data) - 1)


async def test_a_file_git_cannot_hold_makes_the_extraction_incomplete_and_is_named(workshop):
    sandbox = await workshop.open()
    base = await repository.hide_git(sandbox)
    await sandbox.shell("echo 'x = 2' > a.py; mkdir -p d/.GIT; echo > d/.GIT/config", timeout_s=10)
    with pytest.raises(errors.ExtractFailed, match=r"d/\.GIT/config") as caught:
        await workshop.take(sandbox, base)
    assert caught.value.value == "extract_incomplete"


async def test_an_extraction_over_its_time_is_no_patch(workshop):
    sandbox = await workshop.open()
    base = await repository.hide_git(sandbox)
    with pytest.raises(errors.ExtractFailed) as caught:
        await workshop.take(sandbox, base, timeout_s=0.01)
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
        await workshop.take(sandbox, base)
    assert caught.value.value == "extract_failed"


async def test_without_a_pristine_copy_there_is_no_patch(workshop):
    sandbox = await workshop.open()
    with pytest.raises(errors.ExtractFailed, match="no pristine repository was kept"):
        await workshop.take(sandbox, sandbox.base_commit)
    with pytest.raises(errors.SandboxLost):
        await repository.restore_git(sandbox)


async def test_another_base_than_the_kept_one_gives_no_patch(workshop):
    sandbox = await workshop.open()
    await repository.keep_pristine(sandbox)
    with pytest.raises(errors.ExtractFailed, match="the kept base is"):
        await workshop.take(sandbox, "0" * 40)


async def test_processes_of_the_agent_are_gone_before_the_patch_is_taken(workshop):
    sandbox = await workshop.open()
    base = await repository.hide_git(sandbox)
    loop = "while :; do echo $((n += 1)) > n.tmp; mv n.tmp a.py; done"
    started = await sandbox.shell(
        f"setsid bash -c '{loop}' > /dev/null 2>&1 &\nuntil grep -q '^[0-9]' a.py; do :; done", timeout_s=30
    )
    assert started.exit_code == 0
    first = await workshop.take(sandbox, base)
    left = (workshop.work(sandbox) / "a.py").read_bytes()
    assert b"+" + left in first.data
    assert (await workshop.take(sandbox, base)).data == first.data


async def test_cancelling_an_extraction_passes_through(workshop):
    sandbox = await workshop.open()
    base = await repository.hide_git(sandbox)
    task = asyncio.create_task(workshop.take(sandbox, base))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await workshop.take(sandbox, base)).data == b""


async def test_a_sandbox_that_is_gone_is_lost_not_empty(workshop):
    sandbox = await workshop.open()
    base = await repository.hide_git(sandbox)
    await workshop.provider.release(sandbox.key)
    with pytest.raises(errors.SandboxLost):
        await workshop.take(sandbox, base)
