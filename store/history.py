"""Reading what happened: async queries that cannot write, and a guarded door for other people's SQL."""

from __future__ import annotations

import asyncio
import zlib
from typing import TYPE_CHECKING, Any, TypeVar

import sqlalchemy as sa

from store import engine, errors, orphans, place, questions, rows, schema, standing
from store.dialect import Dialect, is_trouble
from store.schema import artifacts, attempts, grades, llm_calls, patches, rewards, rollouts, sandboxes, steps

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from sqlalchemy.ext.asyncio import AsyncConnection

_RETRY_S = 0.5
_RESTORE = "check the database with `rollouts db check`, or restore it from a backup"
_T = TypeVar("_T")

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
    "deliveries": (schema.deliveries, (schema.deliveries.c.at, schema.deliveries.c.delivery_id)),
}


class History:
    """Queries over one database, from any event loop. Opening it connects to nothing.

    While the database cannot be reached, reads wait up to `outage_s`, then raise `errors.StoreUnreachable`.
    """

    def __init__(self, url: sa.URL, *, outage_s: float = 0.0) -> None:
        self._url = url
        self._outage_s = outage_s
        self._dialect = Dialect.of(url)
        self._readers: dict[asyncio.AbstractEventLoop, engine.Readers] = {}

    @classmethod
    def of(cls, url: str) -> History:
        """Read an existing database; raises `errors.StoreUnusable` when there is none."""
        parsed = engine.parse_url(url)
        if parsed.get_backend_name() == "sqlite":
            place.check(place.file_of(parsed), create=False)
        return cls(parsed)

    async def close(self) -> None:
        """Let go of the connections of this event loop, and of loops that are closed."""
        here = asyncio.get_running_loop()
        for loop in [loop for loop in self._readers if loop is here or loop.is_closed()]:
            await self._readers.pop(loop).close(loop_is_closed=loop is not here)

    async def _all(self, query: sa.Select[Any]) -> list[Record]:
        async def rows_of(connection: AsyncConnection) -> list[Record]:
            return [dict(row._mapping) for row in await connection.execute(query)]

        return await self._read(rows_of)

    async def _read(self, work: Callable[[AsyncConnection], Awaitable[_T]]) -> _T:
        """Read with a connection; connections belong to the event loop that made them."""
        loop = asyncio.get_running_loop()
        if loop not in self._readers:
            self._readers[loop] = engine.Readers(self._url)
        started = loop.time()
        while True:
            readers = self._readers[loop]
            try:
                async with readers.places, readers.engine.connect() as connection:
                    return await work(connection)
            except sa.exc.DBAPIError as e:
                if not is_trouble(e):
                    raise errors.StoreUnusable(
                        f"cannot read {engine.shown(self._url)}: {e.orig}",
                        hint="its schema may be an older one: `rollouts db current` shows it, `rollouts db upgrade` brings it"
                        " forward; or another program made it",
                    ) from e
                if loop.time() - started >= self._outage_s:
                    raise engine.explained(e, self._url, opening=self._outage_s == 0) from e
            await asyncio.sleep(_RETRY_S)

    async def rollout(self, rollout_id: str) -> Record | None:
        """Return the rollout's row, or None."""
        found = await self._all(sa.select(rollouts).where(rollouts.c.id == rollout_id))
        return found[0] if found else None

    async def sandbox(self, key: str) -> Record | None:
        """Return the ledger row of a sandbox, or None."""
        found = await self._all(sa.select(sandboxes).where(sandboxes.c.key == key))
        return found[0] if found else None

    async def find(self, prefix: str) -> str:
        """Return the id that begins with `prefix`; raises `errors.StoreUnusable` unless there is exactly one."""
        if not prefix or not prefix.isascii():
            raise errors.StoreUnusable(f"{prefix!r} is no id of a rollout", hint="see `rollouts list`")
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
                rollouts.c.failure_msg, rollouts.c.created_at, rollouts.c.finished_at, rollouts.c.task_sha256,
                rollouts.c.config_sha256, rollouts.c.lease_owner, rollouts.c.lease_until, rollouts.c.fsm_version,
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
        """Return the stored task record; raises `errors.Damaged`."""
        (task,) = await self._all(
            sa.select(schema.tasks.c.record).where(schema.tasks.c.task_sha256 == task_sha256)
        )
        try:
            return (await self.artifact(task["record"])).decode()
        except UnicodeDecodeError as e:
            raise errors.Damaged(f"artifact {task['record']} is damaged: {e}") from e

    async def artifact(self, sha256: str) -> bytes:
        """Return the bytes behind a digest; raises `errors.Damaged` when they are not here or cannot be read."""
        found = await self._all(sa.select(artifacts).where(artifacts.c.sha256 == sha256))
        if not found or found[0]["bytes"] is None:
            raise errors.Damaged(f"artifact {sha256} is not in this database", hint=_RESTORE)
        try:
            return await asyncio.to_thread(rows.unpack, found[0]["codec"], found[0]["bytes"])
        except zlib.error as e:
            raise errors.Damaged(f"artifact {sha256} is damaged: {e}", hint=_RESTORE) from e

    async def validations(self, task_sha256: str, grader_digest: str) -> list[Record]:
        """Return the control runs of a task under one grader."""
        v = schema.validations
        return await self._all(
            sa.select(v)
            .where(v.c.task_sha256 == task_sha256, v.c.grader_digest == grader_digest)
            .order_by(v.c.at)
        )

    async def worker(self, worker_id: str) -> Record | None:
        """Return a worker's row, or None."""
        w = schema.workers.c
        found = await self._all(sa.select(schema.workers).where(w.worker_id == worker_id))
        return found[0] if found else None

    async def open_sandboxes(self) -> list[Record]:
        """Return every open ledger row, oldest first; see `orphans.open_sandboxes`."""
        return await self._all(orphans.open_sandboxes(self._dialect))

    async def unfinished(self) -> list[Record]:
        """Return every rollout that is not over, oldest first; see `orphans.unfinished`."""
        return await self._all(orphans.unfinished(self._dialect))

    async def authorities(self) -> list[tuple[str, str]]:
        """Return the (provider, authority) pairs that sandboxes of this store were made under."""
        query = sa.select(sandboxes.c.provider, sandboxes.c.provider_ref).distinct()
        return sorted((row["provider"], row["provider_ref"]) for row in await self._all(query))

    async def written_off(self) -> set[str]:
        """Return the authorities that somebody wrote off and that nothing was made under since."""
        return {row["provider_ref"] for row in await self._all(orphans.written_off())}

    async def store_uuid(self) -> str:
        """Return the name of this database, which every sandbox key begins with."""
        m = schema.schema_meta.c
        ((uuid,),) = [
            row.values() for row in await self._all(sa.select(m.value).where(m.key == "store_uuid"))
        ]
        return str(uuid)

    async def now(self) -> int:
        """Return the database's clock, epoch milliseconds."""
        ((now,),) = [row.values() for row in await self._all(sa.select(self._dialect.now.label("now")))]
        return int(now)

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

    async def standing(self) -> standing.Standing:
        """Return who works on what, what waits and what nobody owns, all of one moment."""
        return await self._read(lambda connection: standing.read(connection, Dialect.of(self._url)))

    async def sql(self, query: str, *, limit: int, timeout_s: float) -> questions.QueryResult:
        """Run a person's query: read-only in the engine, with a row and a time limit.

        Raises `errors.StoreUnusable` for a statement that fails, writes, or takes too long.
        """
        ask = questions.sqlite if self._url.get_backend_name() == "sqlite" else questions.postgresql
        return await asyncio.to_thread(ask, self._url, query, limit, timeout_s)
