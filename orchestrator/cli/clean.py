"""`rollouts clean`: remove the sandboxes of everybody who is gone, with proof, and say what is left."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator import errors
from orchestrator.cli import render
from orchestrator.cli.console import say
from orchestrator.cli.edge import database_urls, run_async
from orchestrator.cli.options import Csv, Dbs, Json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.recovery import Cleaned
    from store.history import Record
    from store.rollouts import Store

_COLUMNS = tuple(render.Column(name) for name in ("key", "rollout_id", "outcome", "detail", "provider_ref"))


def clean(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    all_mine: Annotated[
        bool,
        typer.Option("--all-mine", help="An authority this database ever used must answer, whatever is open there."),
    ] = False,
    write_off: Annotated[
        str | None,
        typer.Option(
            "--write-off", metavar="REF", show_default=False,
            help="Mark what is open at an authority that will never answer as lost, past its expiry.",
        ),
    ] = None,
    reason: Annotated[
        str | None, typer.Option("--reason", help="Why it will never answer; stored as the proof.", show_default=False)
    ] = None,
    db: Dbs = None,
    as_json: Json = False,
    as_csv: Csv = False,
) -> None:  # fmt: skip
    """Remove every sandbox whose owner is gone. Live workers, and sandboxes of other databases, are never touched.

    `rollouts resume` first: it goes on in sandboxes of unfinished rollouts that this removes.

    Repeating it, also at the same time, is harmless. Exit code 1: something remains, or could not be asked.
    """
    from orchestrator import assembly

    urls = database_urls(db)
    if write_off is not None or reason is not None:
        _check_write_off(write_off, reason, dry_run=dry_run)
        raise typer.Exit(0 if _written_off(urls, str(write_off), str(reason)) else 1)
    cleaned: dict[str, Cleaned] = {}
    for url in urls:
        try:
            cleaned[url] = run_async(assembly.clean(url, dry_run=dry_run, every=all_mine))
        except errors.NothingKnown as e:
            if len(urls) == 1:
                raise
            say(f"{assembly.shown(url)}: {e}; {e.hint}")
    rows = [
        {"key": s.key, "rollout_id": s.rollout_id, "outcome": s.outcome, "detail": s.detail, "provider_ref": s.provider_ref}
        for done in cleaned.values() for s in done.swept
    ]  # fmt: skip
    render.emit(rows, _COLUMNS, render.form_of(as_json=as_json, as_csv=as_csv))
    for url, done in cleaned.items():
        for ref, why in done.unknown.items():
            say(f"unknown: {ref} could not be asked: {why}")
        if done.resumable:
            say(f"{done.resumable} unfinished rollouts that nobody has wait for `rollouts resume`")
        say((f"{assembly.shown(url)}: " if len(urls) > 1 else "") + _summary(done, dry_run=dry_run))
    proven = all(not done.unknown if dry_run else done.clean for done in cleaned.values())
    raise typer.Exit(0 if proven and len(cleaned) == len(urls) else 1)


class _UnknownAuthority(errors.UsageError):
    """A database in which nothing was ever made under the authority."""


def _check_write_off(ref: str | None, reason: str | None, *, dry_run: bool) -> None:
    if ref is None:
        raise errors.UsageError("--reason goes with --write-off", hint="name the authority, or leave it out")
    if not (reason and reason.strip()):
        raise errors.UsageError("--write-off needs --reason", hint="say why the authority will never answer")
    if dry_run:
        raise errors.UsageError(
            "--dry-run and --write-off exclude each other", hint="see the view sandbox_leaks"
        )


def _written_off(urls: Sequence[str], ref: str, reason: str) -> bool:
    """Write off in every database that knows the authority; return whether nothing of it stays open."""
    settled: list[bool] = []
    refusal: errors.RolloutsError | None = None
    for url in urls:
        try:
            settled.append(_write_off(url, ref, reason))
        except _UnknownAuthority as e:
            refusal = e
        except errors.NothingKnown as e:
            if len(urls) == 1:
                raise
            say(f"{e}; {e.hint}")
            settled.append(False)
    if refusal is not None and not settled:
        raise refusal
    return all(settled)


def _write_off(url: str, ref: str, reason: str) -> bool:
    """Write off what may be, say what stays and until when, and return whether nothing does."""
    from orchestrator import assembly, identity

    async def write() -> tuple[list[str], list[Record]]:
        store = await assembly.open_existing(url)
        try:
            await _refuse_known(store, ref)
            await store.take_from_dead()
            lost = await store.write_off(ref, f"by {identity.user()}: {reason.strip()}")
            rows = await store.history.open_sandboxes()
            return lost, [row for row in rows if row["provider_ref"] == ref]
        finally:
            await store.close()

    lost, left = run_async(write())
    for key in lost:
        say(f"{key}: lost")
    for row in left:
        ends = row["expires_at"] or row["create_deadline"] + row["ttl_s"] * 1000
        why = "a live worker has its rollout" if row["held"] else f"it may live until {render.iso(ends)}"
        say(f"{row['key']}: stays open, {why}")
    say(f"{len(lost)} sandboxes of {ref} written off, {len(left)} stay open")
    return not left


async def _refuse_known(store: Store, ref: str) -> None:
    """Raise `errors.UsageError` for an authority that no sandbox was made under, or that answers."""
    from orchestrator import assembly, identity

    names = {known: name for name, known in await store.history.authorities()}
    if ref not in names:
        known = ", ".join(names) or "none"
        raise _UnknownAuthority(f"no sandbox was made under {ref}", hint=f"the authorities are: {known}")
    try:
        await assembly.provider_named(names[ref]).list_ours(identity.sandbox_prefix(store.uuid), ref)
    except errors.RolloutsError:
        return
    raise errors.UsageError(f"{ref} answers, so nothing has to be written off", hint="run `rollouts clean`")


def _summary(done: Cleaned, *, dry_run: bool) -> str:
    if dry_run:
        count = [s.outcome for s in done.swept].count
        kept = f"{count('kept')} belong to live workers"
        return f"{count('would remove')} sandboxes would be removed, {kept}, {count('open')} cannot be judged"
    hint = "" if done.clean else "; run it again when their provider answers, or see --write-off"
    return done.counts + hint
