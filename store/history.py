"""Reading what happened: async queries that cannot write, and a guarded door for other people's SQL."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from store import engine, errors, rows, schema
from store.schema import artifacts, attempts, grades, llm_calls, patches, rewards, rollouts, sandboxes, steps

if TYPE_CHECKING:
    from collections.abc import Sequence

Record = dict[str, Any]
"""One row as column name -> value."""

_PER_ROLLOUT: dict[str, tuple[sa.Table, tuple[sa.Column[Any], ...]]] = {
    "attempts": (attempts, (attempts.c.fence,)),
    "transitions": (schema.transitions, (schema.transitions.c.seq,)),
    "sandboxes": (sandboxes, (sandboxes.c.intent_at, sandboxes.c.key)),
    "steps": (steps, (steps.c.attempt_no, steps.c.name)),
    "llm_calls": (llm_calls, (llm_calls.c.fence, llm_calls.c.call_no)),
    "patches": (patches, (patches.c.fence, patches.c.n)),
    "grades": (grades, (grades.c.ended_at, grades.c.run_no)),
    "rewards": (rewards, ()),
}


@dataclass(frozen=True, slots=True)
class QueryResult:
    """Rows of a person's query; `cut` says that the row limit left some out."""

    columns: list[str]
    rows: list[tuple[Any, ...]]
    cut: bool


class History:
    """Queries over one database. Opening it connects to nothing."""

    def __init__(self, url: sa.URL) -> None:
        self._path = engine.file_of(url)
        self._engine = engine.read_engine(url)

    @classmethod
    def of(cls, url: str) -> History:
        """Read an existing database; raises `errors.StoreUnusable` when there is none."""
        parsed = engine.parse_url(url)
        engine.check_place(engine.file_of(parsed), create=False)
        return cls(parsed)

    async def close(self) -> None:
        """Let go of every connection."""
        await self._engine.dispose()

    async def _all(self, query: sa.Select[Any]) -> list[Record]:
        try:
            async with self._engine.connect() as connection:
                return [dict(row._mapping) for row in await connection.execute(query)]
        except sa.exc.DatabaseError as e:
            raise errors.StoreUnusable(
                f"cannot read {self._path}: {e.orig}", hint="is this a database of this program's version?"
            ) from e

    async def rollout(self, rollout_id: str) -> Record | None:
        """Return the rollout's row, or None."""
        found = await self._all(sa.select(rollouts).where(rollouts.c.id == rollout_id))
        return found[0] if found else None

    async def find(self, prefix: str) -> str:
        """Return the id that begins with `prefix`; raises `errors.StoreUnusable` unless there is exactly one."""
        query = sa.select(rollouts.c.id).where(rollouts.c.id.startswith(prefix, autoescape=True)).limit(3)
        found = [str(row["id"]) for row in await self._all(query)]
        if len(found) == 1:
            return found[0]
        what = "no rollout" if not found else "more than one rollout"
        raise errors.StoreUnusable(
            f"{what} has an id that begins with {prefix!r}", hint="see `rollouts list`"
        )

    async def overview(
        self,
        *,
        run_id: str | None = None,
        state: str | None = None,
        instance_id: str | None = None,
        since_ms: int | None = None,
        limit: int | None = None,
    ) -> list[Record]:
        """Return rollouts with their grade and reward, newest first."""
        query = (
            sa.select(
                rollouts.c.id, rollouts.c.run_id, rollouts.c.instance_id, rollouts.c.sample, rollouts.c.retry_no,
                rollouts.c.agent_type, rollouts.c.state, rollouts.c.attempts, rewards.c.reward,
                grades.c.outcome.label("grade_outcome"), grades.c.mask_sample, rollouts.c.failure_class,
                rollouts.c.failure_msg, rollouts.c.created_at, rollouts.c.finished_at,
            )
            .join(rewards, rewards.c.rollout_id == rollouts.c.id, isouter=True)
            .join(grades, grades.c.grade_id == rewards.c.grade_id, isouter=True)
            .order_by(rollouts.c.created_at.desc(), rollouts.c.id.desc())
        )  # fmt: skip
        for column, value in ((rollouts.c.run_id, run_id), (rollouts.c.state, state)):
            query = query if value is None else query.where(column == value)
        if instance_id is not None:
            query = query.where(rollouts.c.instance_id == instance_id)
        if since_ms is not None:
            query = query.where(rollouts.c.created_at >= since_ms)
        return await self._all(query if limit is None else query.limit(limit))

    async def of_rollout(self, table: str, rollout_id: str) -> list[Record]:
        """Return the rollout's rows of one table, in the order in which they came about.

        `table`: attempts, transitions, sandboxes, steps, llm_calls, patches, grades or rewards.
        """
        source, order = _PER_ROLLOUT[table]
        return await self._all(sa.select(source).where(source.c.rollout_id == rollout_id).order_by(*order))

    async def task_json(self, task_sha256: str) -> str:
        """Return the stored task record."""
        (task,) = await self._all(
            sa.select(schema.tasks.c.record).where(schema.tasks.c.task_sha256 == task_sha256)
        )
        return (await self.artifact(task["record"])).decode()

    async def artifact(self, sha256: str) -> bytes:
        """Return the bytes behind a digest; raises `errors.StoreUnusable` when they are not here."""
        found = await self._all(sa.select(artifacts).where(artifacts.c.sha256 == sha256))
        if not found or found[0]["bytes"] is None:
            raise errors.StoreUnusable(f"artifact {sha256} is not in this database")
        return await asyncio.to_thread(rows.unpack, found[0]["codec"], found[0]["bytes"])

    async def validations(self, task_sha256: str, grader_digest: str) -> list[Record]:
        """Return the control runs of a task under one grader."""
        v = schema.validations
        return await self._all(
            sa.select(v)
            .where(v.c.task_sha256 == task_sha256, v.c.grader_digest == grader_digest)
            .order_by(v.c.at)
        )

    async def run_states(self, run_ids: Sequence[str]) -> dict[str, dict[str, int]]:
        """Return run -> state -> number of rollouts, for the runs that exist."""
        query = (
            sa.select(rollouts.c.run_id, rollouts.c.state, sa.func.count().label("n"))
            .where(rollouts.c.run_id.in_(run_ids))
            .group_by(rollouts.c.run_id, rollouts.c.state)
        )
        counts: dict[str, dict[str, int]] = {}
        for row in await self._all(query):
            counts.setdefault(row["run_id"], {})[row["state"]] = row["n"]
        return counts

    async def run_family(self, name: str) -> list[str]:
        """Return the runs called NAME, NAME.2, NAME.3, ... that exist."""
        like = rollouts.c.run_id.startswith(f"{name}.", autoescape=True)
        query = sa.select(rollouts.c.run_id).where(sa.or_(rollouts.c.run_id == name, like)).distinct()
        return [str(row["run_id"]) for row in await self._all(query)]

    async def sql(self, query: str, *, limit: int, timeout_s: float) -> QueryResult:
        """Run a person's query: read-only in the engine, with a row and a time limit.

        Raises `errors.StoreUnusable` for a statement that fails, writes, or takes too long.
        """
        return await asyncio.to_thread(_guarded, self._path.as_uri() + "?mode=ro", query, limit, timeout_s)


_READS = frozenset(
    {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
)
_FORBIDDEN_FUNCTIONS = frozenset({"load_extension", "writefile", "edit", "fts3_tokenizer"})


def _guarded(uri: str, query: str, limit: int, timeout_s: float) -> QueryResult:
    deadline = time.monotonic() + timeout_s

    def authorise(action: int, _one: str | None, two: str | None, _db: str | None, _by: str | None) -> int:
        if action == sqlite3.SQLITE_FUNCTION and two in _FORBIDDEN_FUNCTIONS:
            return sqlite3.SQLITE_DENY
        return sqlite3.SQLITE_OK if action in _READS else sqlite3.SQLITE_DENY

    connection = sqlite3.connect(uri, uri=True)
    try:
        connection.set_authorizer(authorise)
        connection.set_progress_handler(lambda: int(time.monotonic() > deadline), 10_000)
        cursor = connection.execute(query)
        found = cursor.fetchmany(limit + 1)
        columns = [column[0] for column in cursor.description or ()]
    except (sqlite3.Error, sqlite3.Warning) as e:
        if "interrupted" in str(e):
            raise errors.StoreUnusable(
                f"the query took longer than {timeout_s:g} s", hint="narrow it, or raise --timeout"
            ) from e
        why = "only SELECT is allowed here" if "authoriz" in str(e) else str(e)
        raise errors.StoreUnusable(
            f"the query was refused: {why}", hint="see the tables with `rollouts sql --schema`"
        ) from e
    finally:
        connection.close()
    return QueryResult(columns=columns, rows=found[:limit], cut=len(found) > limit)
