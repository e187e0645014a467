"""Tasks whose code is other people's: base tree and patches are derived from two releases, never kept in a repository.

Both source distributions come through pip from the package index that pip is configured for, by name, version and
sha256. Their code is not run here: pip asks a package's build backend for metadata before it keeps a download, and a
backend of ours, which hands out the PKG-INFO that every source distribution carries, stands in for the usual ones.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import re
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pydantic

from orchestrator import errors
from orchestrator.tasks.fields import relative_path
from orchestrator.tasks.record import Frozen
from orchestrator.tasks.snapshot import Snapshot, pack, unpack

if TYPE_CHECKING:
    from collections.abc import Iterator

RECIPE = 1
"""Part of the cache key: rises whenever the same source block would give other files."""
DOWNLOAD_TIMEOUT_S = 300.0

_BACKENDS = (
    "setuptools/build_meta.py", "flit_core/buildapi.py", "hatchling/build.py", "poetry/core/masonry/api.py",
    "pdm/backend/__init__.py",
)  # fmt: skip
_BACKEND = """\
import email.parser, pathlib, re, sys

__legacy__ = sys.modules[__name__]


def get_requires_for_build_wheel(config_settings=None):
    return []


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    text = pathlib.Path("PKG-INFO").read_bytes()
    fields = email.parser.BytesHeaderParser().parsebytes(text)
    parts = [re.sub("[-_.]+", "_", fields["Name"]), fields["Version"].replace("-", "_")]
    folder = pathlib.Path(metadata_directory, "-".join(parts) + ".dist-info")
    folder.mkdir()
    (folder / "METADATA").write_bytes(text)
    return folder.name
"""
_START_PIP = """\
import os, runpy, sys

os.environ["PYTHONPATH"] = sys.argv.pop(1)
os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
sys.argv[0] = "pip"
runpy.run_module("pip", run_name="__main__")
"""


class Release(Frozen):
    """One source distribution."""

    version: str = pydantic.Field(pattern=r"^[0-9A-Za-z][0-9A-Za-z.!+_-]*$", max_length=100)
    sha256: str = pydantic.Field(pattern=r"^[0-9a-f]{64}$")


class Source(Frozen):
    """The `source` block of a task folder: the releases before and after a fix, and what to take from the second."""

    package: str = pydantic.Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$", max_length=200)
    buggy: Release
    fixed: Release
    gold_files: tuple[str, ...] = pydantic.Field(min_length=1)
    """Files whose fixed form is the gold patch."""
    test_files: tuple[str, ...] = pydantic.Field(min_length=1)
    """Files whose fixed form is the test patch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Derived:
    """What two releases give."""

    archive: Path
    archive_sha256: str
    base_commit: str
    gold_patch: bytes
    test_patch: bytes


def parse_source(block: object) -> Source:
    """Return the `source` block of a `task.yaml`; raises `errors.RecordRefused`."""
    try:
        source = Source.model_validate(block)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in ("source", *first["loc"]))
        raise errors.RecordRefused(f"{where}: {first['msg']}", hint="put versions in quotes") from None
    for name in (*source.gold_files, *source.test_files):
        if relative_path("source", name) != name:
            raise errors.RecordRefused(f"source names {name!r}, which is not in normal form")
    return source


def derive(source: Source, *, instance_id: str, cache_dir: Path, python: Path) -> Derived:
    """Return base tree and patches, made once and kept in `cache_dir`; many processes may ask at the same time.

    `python` runs pip. Raises `errors.RecordRefused` when the releases cannot be had or are not what was pinned.
    """
    key = hashlib.sha256(f"{RECIPE}\n{source.model_dump_json()}".encode()).hexdigest()[:16]
    name = re.sub(r"[^A-Za-z0-9._-]", "_", instance_id)[:100].lstrip(".")
    folder = cache_dir / "tasks" / f"{name}-{key}"
    try:
        with _locked(folder):
            found = _read(folder)
            if found is None:
                shutil.rmtree(folder, ignore_errors=True)
                with _scratch(folder) as scratch:
                    made = scratch / "made"
                    _make(source, made, scratch, cache_dir, python)
                    made.rename(folder)
                found = _read(folder)
    except OSError as error:
        raise errors.RecordRefused(
            f"the cache folder {cache_dir} cannot be used: {error}", hint="name another cache folder"
        ) from None
    if found is None:
        raise errors.RecordRefused(
            f"{folder} changed while it was read", hint="remove that folder and try again"
        )
    return found


@contextlib.contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Hold the lock of one cache entry. The kernel drops it with the process, so no lock outlives a crash."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_name(f".{target.name}.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _scratch(target: Path) -> Iterator[Path]:
    """Give a folder beside a locked cache entry, and remove what a killed process left of such folders."""
    prefix = f".new-{target.name}-"
    for left in target.parent.glob(f"{prefix}*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=target.parent) as scratch:
        yield Path(scratch)


def _read(folder: Path) -> Derived | None:
    """Return a cache entry, or None unless every file of it has the digest that was written down."""
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
        content = {name: (folder / name).read_bytes() for name in ("repo.tar", "gold.patch", "test.patch")}
        if any(hashlib.sha256(data).hexdigest() != manifest[name] for name, data in content.items()):
            return None
        return Derived(
            archive=folder / "repo.tar",
            archive_sha256=manifest["repo.tar"],
            base_commit=manifest["base_commit"],
            gold_patch=content["gold.patch"],
            test_patch=content["test.patch"],
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _make(source: Source, made: Path, scratch: Path, cache_dir: Path, python: Path) -> None:
    releases = (source.buggy, source.fixed)
    with ThreadPoolExecutor(max_workers=2) as pool:
        archives = list(
            pool.map(lambda r: download(source.package, r, cache_dir=cache_dir, python=python), releases)
        )
    buggy, fixed = (
        _unpacked(archive, scratch / name) for archive, name in zip(archives, ("a", "b"), strict=True)
    )
    for path in sorted(buggy.rglob("*"), reverse=True):
        if path.suffix in {".egg-info", ".pyc"} or path.name in {"PKG-INFO", "__pycache__"}:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    snapshot = Snapshot(buggy, scratch / "git")
    made.mkdir()
    pack(buggy, snapshot.files(), made / "repo.tar")
    for name, files in (("gold.patch", source.gold_files), ("test.patch", source.test_files)):
        for file in files:
            _take(fixed / file, buggy / file)
        patch = snapshot.diff()
        if not patch:
            raise errors.RecordRefused(f"the {name} is empty: both releases have the same {', '.join(files)}")
        (made / name).write_bytes(patch)
        snapshot.restore()
    names = ("repo.tar", "gold.patch", "test.patch")
    manifest = {name: hashlib.sha256((made / name).read_bytes()).hexdigest() for name in names}
    (made / "manifest.json").write_text(json.dumps(manifest | {"base_commit": snapshot.commit}, indent=2))


def _take(source: Path, target: Path) -> None:
    """Give `target` the content of `source`, or remove it when the fixed release has none."""
    if source.is_file() and not source.is_symlink():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
    else:
        target.unlink(missing_ok=True)


def _unpacked(archive: Path, folder: Path) -> Path:
    folder.mkdir()
    unpack(archive, folder)
    entries = list(folder.iterdir())
    if len(entries) != 1 or not entries[0].is_dir():
        raise errors.RecordRefused(f"{archive.name} does not hold one folder, as a source distribution does")
    return entries[0]


def download(package: str, release: Release, *, cache_dir: Path, python: Path) -> Path:
    """Return the source distribution with this sha256, from the cache or through pip.

    Raises `errors.RecordRefused` when pip cannot get it or its bytes are others.
    """
    folder = cache_dir / "sdists" / release.sha256
    with _locked(folder):
        kept = [path for path in folder.glob("*") if _digest(path) == release.sha256]
        if kept:
            return kept[0]
        shutil.rmtree(folder, ignore_errors=True)
        with _scratch(folder) as scratch:
            made = scratch / "made"
            _run_pip(package, release, made, scratch, python)
            files = list(made.iterdir()) if made.is_dir() else []
            if [_digest(path) for path in files] != [release.sha256]:
                raise errors.RecordRefused(
                    f"pip brought other files for {package} {release.version} than asked for"
                )
            made.rename(folder)
    return folder / files[0].name


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _run_pip(package: str, release: Release, made: Path, scratch: Path, python: Path) -> None:
    requirement = scratch / "requirement.txt"
    requirement.write_text(f"{package}=={release.version} --hash=sha256:{release.sha256}\n")
    backends = scratch / "backends"
    for name in _BACKENDS:
        for parent in [p for p in Path(name).parents if p.name]:
            (backends / parent).mkdir(parents=True, exist_ok=True)
            (backends / parent / "__init__.py").touch()
        (backends / name).write_text(_BACKEND)
    arguments = [
        str(python), "-c", _START_PIP, str(backends), "download", "--quiet", "--no-input", "--disable-pip-version-check",
        "--no-deps", "--no-binary=:all:", "--no-build-isolation", "--use-pep517", "--require-hashes",
        f"--dest={made}", f"--requirement={requirement}",
    ]  # fmt: skip
    what = f"{package} {release.version} could not be downloaded"
    try:
        done = subprocess.run(
            arguments, cwd=scratch, stdin=subprocess.DEVNULL, capture_output=True, timeout=DOWNLOAD_TIMEOUT_S, check=False
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise errors.RecordRefused(f"{what} within {DOWNLOAD_TIMEOUT_S:.0f} s") from None
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        reason = next(
            (line for line in lines if line.startswith("ERROR: ")), lines[-1] if lines else "no message"
        )
        raise errors.RecordRefused(
            f"{what}: {reason.removeprefix('ERROR: ')[:400]}",
            hint="this task needs the package index once; offline, run a task that carries its own repository",
        )
