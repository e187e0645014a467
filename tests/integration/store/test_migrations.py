"""Every earlier schema, full of rows, comes forward and loses none; what arrives is what is declared, guards included."""

from __future__ import annotations

import hashlib
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa

from store import engine, errors, revisions, rows, schema, soundness, triggers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.conftest import Database, OpenStore

pytestmark = pytest.mark.databases("sqlite", "postgresql")

LINE = ("created", "sandbox_ready", "agent_running", "patched", "graded", "released")
TRIGGERS = ("provision", "start_agent", "take_patch", "grade", "release")


@contextmanager
def writing(url: str) -> Iterator[sa.Connection]:
    opened = engine.write_engine(engine.parse_url(url))
    try:
        with opened.begin() as connection:
            yield connection
    finally:
        opened.dispose()


def insert(connection: sa.Connection, table: str, **columns: Any) -> None:
    """Insert a row into a table as it was at that revision."""
    reflected = connection.info.setdefault("reflected", sa.MetaData())
    there = sa.Table(table, reflected, autoload_with=connection)
    connection.execute(sa.insert(there), columns)


def populate(connection: sa.Connection) -> None:
    """Fill the tables of an old schema: rollouts in every state, with history, sandboxes and, where it has them, evidence."""
    insert(connection, "schema_meta", key="store_uuid", value="old")
    for digest in ("task", "log"):
        insert(
            connection, "artifacts", sha256=digest, codec="raw", size=3, bytes=b"\x00\xff\n", location=None
        )
    insert(
        connection, "tasks", task_sha256="t", instance_id="demo__demo-1", dataset_kind="local", eval_sha256="e",
        record="task", created_at=1,
    )  # fmt: skip
    insert(
        connection, "workers", worker_id="w", host="h", boot_id="b", pid_ns="n", pid=7, pid_started="8",
        code_version="c", started_at=1, heartbeat_at=2,
    )  # fmt: skip
    for steps in range(len(LINE)):
        rollout(connection, f"r{steps}", steps)
    rollout(connection, "failed", 1)
    move(connection, "failed", 2, "fail", "sandbox_ready", "failed")
    has_evidence = sa.inspect(connection).has_table("grades")
    if has_evidence:
        evidence(connection)
    if sa.inspect(connection).has_table("deliveries"):
        insert(
            connection, "deliveries", delivery_id="d", rollout_id="r4", at=7, session_ref="s", policy_version="1",
            kind="value", value=1.0,
        )  # fmt: skip


def rollout(connection: sa.Connection, name: str, steps: int) -> None:
    insert(
        connection, "rollouts", id=name, idem_key=f"key-{name}", request_sha256="q", run_id="run",
        instance_id="demo__demo-1", task_sha256="t", agent_type="swe", config_sha256="c", endpoint_kind="stateless",
        fence=1, attempts=1, input={"ä": [1, None]}, fsm_version=1, outcome_table=1, created_at=1, updated_at=1,
    )  # fmt: skip
    insert(
        connection, "attempts", rollout_id=name, fence=1, attempt_no=1, worker_id="w", code_version="c", claimed_at=3
    )  # fmt: skip
    insert(
        connection, "sandboxes", key=f"rw-{name}", rollout_id=name, fence=1, role="task", provider="local",
        provider_ref="here", status="live", provider_ids=["a"], ttl_s=60, intent_at=3, create_deadline=9,
    )  # fmt: skip
    for n in range(steps):
        move(connection, name, n + 1, TRIGGERS[n], LINE[n], LINE[n + 1])


def move(connection: sa.Connection, name: str, seq: int, trig: str, src: str, dst: str) -> None:
    is_over = dst in schema.TERMINAL
    changed = {
        "name": name, "dst": dst, "seq": seq, "at": 5 if is_over else None, "why": "internal" if dst == "failed" else None,
    }  # fmt: skip
    connection.execute(
        sa.text(
            "UPDATE rollouts SET state = :dst, version = :seq, finished_at = :at, failure_class = :why WHERE id = :name"
        ),
        changed,
    )
    insert(
        connection, "transitions", rollout_id=name, seq=seq, src=src, trig=trig, dst=dst, fence=1, actor="w",
        op_id=f"op-{seq}", at=4, payload={"n": seq},
    )  # fmt: skip


def evidence(connection: sa.Connection) -> None:
    insert(
        connection, "validations", task_sha256="t", grader_digest="d", run_no=1, patch="gold", outcome="resolved",
        as_expected=1, reasons=[], test_map="log", log="log", duration_s=0.1, at=6,
    )  # fmt: skip
    insert(
        connection, "steps", rollout_id="r3", fence=1, attempt_no=1, name="turn-0001", output="{}", output_sha256="o",
        tool_calls=1, format_errors=0, command_timeouts=0, truncated_observations=0, tool_ms=4, at=6,
    )  # fmt: skip
    insert(
        connection, "llm_calls", rollout_id="r3", fence=1, call_no=1, via="direct", source_seq=1, kind="turn",
        outcome="ok", request_sha256="q", prompt_tokens=1, completion_tokens=2, cached_tokens=0, duration_ms=3, at=6,
    )  # fmt: skip
    insert(
        connection, "patches", rollout_id="r3", fence=1, n=1, sha256="p", artifact="log", size=3, base_commit="c",
        exit_reason="submitted", exit_message="", files=1, insertions=1, deletions=0, paths=["a"], notes=[], at=6,
    )  # fmt: skip
    insert(
        connection, "grades", grade_id="g", rollout_id="r4", fence=1, patch_sha256="p", grader_digest="d", run_no=1,
        reason="first", outcome="resolved", verdict=1, reward=1.0, mask_sample=0, evidence="junit", f2p_pass=1,
        f2p_total=1, p2p_pass=0, p2p_total=0, test_map="log", log="log", grader="eval", grader_version="1",
        task_sha256="t", eval_sha256="e", flags=[], duration_s=0.1, ended_at=6,
    )  # fmt: skip
    insert(
        connection, "rewards", rollout_id="r4", grade_id="g", reward=1.0, valid=1, reward_fn_version="1",
        outcome_table=1, stats="{}", stats_sha256="s", at=6,
    )  # fmt: skip


def contents(connection: sa.Connection, columns: dict[str, list[str]]) -> dict[str, tuple[int, str]]:
    """Return table -> (rows, digest of these columns of all of them); of `schema_meta` what no migration makes."""
    found = {}
    for table, names in columns.items():
        listed = ", ".join(f'"{name}"' for name in names)
        ours = " WHERE key = 'store_uuid'" if table == "schema_meta" else ""
        query = sa.text(f"SELECT {listed} FROM {table}{ours}")
        lines = sorted(
            repr([bytes(v) if isinstance(v, memoryview) else v for v in row])
            for row in connection.execute(query)
        )
        found[table] = (len(lines), hashlib.sha256("\n".join(lines).encode()).hexdigest())
    return found  # fmt: skip


@pytest.mark.parametrize("revision", revisions.known()[:-1])
def test_a_populated_database_of_an_earlier_schema_loses_nothing(database: Database, revision: str):
    url = database.beside("old.db")
    with writing(url) as connection:
        revisions.upgrade(connection, revision)
    with writing(url) as connection:
        populate(connection)
        assert revisions.current(connection) == revision
        looked = sa.inspect(connection)
        columns = {
            table: [c["name"] for c in looked.get_columns(table)]
            for table in looked.get_table_names()
            if table != "alembic_version"
        }
        before = contents(connection, columns)
    assert min(count for count, _ in before.values()) >= 1, "every table has rows"
    assert soundness.complaints(url) == [
        f"the schema is at {revision}, behind this program's {revisions.newest()}: run `rollouts db upgrade`"
    ]
    with writing(url) as connection:
        revisions.upgrade(connection)
    with writing(url) as connection:
        assert contents(connection, columns) == before
    assert soundness.complaints(url) == []
    with pytest.raises(sa.exc.IntegrityError, match="append-only"), writing(url) as connection:
        connection.exec_driver_sql("UPDATE transitions SET trig = 'grade'")


async def test_the_rollouts_of_the_oldest_schema_go_on(database: Database, open_store: OpenStore):
    (name, url) = (
        ("old.db", database.beside("old.db")) if database.is_sqlite else ("rollouts.db", database.url)
    )
    if not database.is_sqlite:
        database.ask("DROP SCHEMA public CASCADE")
        database.ask("CREATE SCHEMA public")
    with writing(url) as connection:
        revisions.upgrade(connection, revisions.known()[0])
    with writing(url) as connection:
        populate(connection)
    opened = await open_store(name)
    try:
        assert opened.uuid == "old"
        leases = {lease.rollout_id: lease for lease in await opened.claim(limit=9)}
        assert sorted(leases) == ["r0", "r1", "r2", "r3", "r4"]
        assert leases["r3"].fence == 2
        assert await opened.transition(leases["r3"], "grade", op_id="g") == rows.Applied(
            version=4, state="graded"
        )
    finally:
        await opened.close()


def test_the_migrated_schema_equals_the_declared_one(database: Database):
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    with writing(database.url) as connection:
        assert compare_metadata(MigrationContext.configure(connection), schema.metadata) == []
        migrated = shape(connection)
    with writing(database.beside("declared.db")) as connection:
        schema.metadata.create_all(connection)
        for guard in triggers.GUARDS:
            made = (triggers.sqlite(guard),) if database.is_sqlite else triggers.postgresql(guard)
            for statement in made:
                connection.exec_driver_sql(statement)
        assert shape(connection) == migrated


def shape(connection: sa.Connection) -> dict[str, Any]:
    """Everything about the tables that a comparison of metadata does not see, as the engine itself tells it."""
    looked = sa.inspect(connection)
    if connection.dialect.name == "sqlite":
        guards = "SELECT name, sql FROM sqlite_master WHERE type = 'trigger'"
        where = "sqlite_where"
    else:
        guards = (
            "SELECT tgname, pg_get_triggerdef(oid) || pg_get_functiondef(tgfoid) FROM pg_trigger"
            " WHERE NOT tgisinternal"
        )
        where = "postgresql_where"
    return {
        "guards": sorted((str(name), str(text)) for name, text in connection.exec_driver_sql(guards)),
        **{
            table: (
                [(c["name"], str(c["type"]), c["nullable"], c["default"]) for c in looked.get_columns(table)],
                sorted((str(c["name"]), c["sqltext"]) for c in looked.get_check_constraints(table)),
                sorted(
                    (str(i["name"]), str(i["column_names"]), str((i.get("dialect_options") or {}).get(where)))
                    for i in looked.get_indexes(table)
                ),
                sorted(str(k["constrained_columns"] + k["referred_columns"]) for k in looked.get_foreign_keys(table)),
                sorted(str(u["column_names"]) for u in looked.get_unique_constraints(table)),
            )
            for table in schema.metadata.tables
        },
    }  # fmt: skip


@pytest.mark.parametrize(
    ("harm", "complaint"),
    [
        ("DROP TRIGGER rewards_no_update{on}", "guard rewards_no_update (rewards is append-only) is missing"),
        ("DROP INDEX ix_sandboxes_open", "index ix_sandboxes_open is missing"),
        ("DROP INDEX ix_sandboxes_open; CREATE INDEX ix_sandboxes_open ON sandboxes (key)",
         "index ix_sandboxes_open covers other rows than declared"),
        ("ALTER TABLE rollouts DROP COLUMN rescue_count", "column rollouts.rescue_count is missing"),
    ],
)  # fmt: skip
def test_whatever_somebody_took_away_is_missed(database: Database, harm: str, complaint: str):
    for statement in harm.format(on="" if database.is_sqlite else " ON rewards").split("; "):
        database.ask(statement)
    assert soundness.complaints(database.url) == [complaint]


@pytest.mark.databases("postgresql")
@pytest.mark.parametrize(
    ("harm", "complaint"),
    [
        ("ALTER TABLE rollouts DROP CONSTRAINT ck_rollouts_failure", "check ck_rollouts_failure is missing"),
        ("ALTER TABLE rewards DISABLE TRIGGER rewards_no_update",
         "guard rewards_no_update (rewards is append-only) is missing"),
        ("CREATE OR REPLACE FUNCTION rewards_no_update() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'",
         "guard rewards_no_update is not as declared"),
    ],
)  # fmt: skip
def test_whatever_somebody_switched_off_is_missed(database: Database, harm: str, complaint: str):
    database.ask(harm)
    assert soundness.complaints(database.url) == [complaint]


@pytest.mark.databases
@pytest.mark.parametrize("oldest", [None, "9998"])
async def test_a_schema_that_is_too_new_is_refused_with_both_revisions(
    open_store: OpenStore, database: Database, oldest: str | None
):
    await (await open_store()).close()
    newer(database, oldest)
    both = f"9999.*{revisions.newest()}"
    for refuse in (soundness.standing, soundness.complaints):
        with pytest.raises(errors.StoreUnusable, match=both):
            refuse(database.url)
    if database.kind != "shared":  # the other process works on in it, as it did
        with pytest.raises(errors.StoreUnusable, match=both):
            await open_store()
    database.ask(f"UPDATE alembic_version SET version_num = '{revisions.newest()}'")


def newer(database: Database, oldest: str | None) -> None:
    """Let a later program have been here, after which programs must know the revision `oldest`."""
    database.ask("UPDATE alembic_version SET version_num = '9999'")
    database.ask("DELETE FROM schema_meta WHERE key = 'min_code'")
    if oldest is not None:
        database.ask(f"INSERT INTO schema_meta VALUES ('min_code', '{oldest}')")


async def test_a_newer_schema_that_still_serves_this_program_is_worked_in_and_judged_by_nobody_else(
    open_store: OpenStore, database: Database, new_rollout: Callable[..., rows.NewRollout]
):
    await (await open_store()).close()
    newer(database, revisions.newest())
    opened = await open_store()
    await opened.submit([new_rollout()])
    assert len(await opened.claim(limit=1)) == 1
    await opened.close()
    assert soundness.standing(database.url) == "9999"
    assert soundness.complaints(database.url) == [
        f"the schema is at 9999, newer than this program's {revisions.newest()}: check it with the newer program"
    ]


BREAKING = """from alembic import op

revision, down_revision, additive = "9999", "{newest}", False


def upgrade():
    op.execute("UPDATE schema_meta SET value = '9999' WHERE key = 'min_code'")
"""


async def test_a_migration_that_breaks_running_programs_waits_until_nobody_holds_a_rollout(
    open_store: OpenStore,
    database: Database,
    new_rollout: Callable[..., rows.NewRollout],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    running = await open_store()
    await running.submit([new_rollout()])
    await running.claim(limit=1)
    later = tmp_path / "migrations"
    shutil.copytree(revisions.MIGRATIONS, later)
    (later / "versions" / "9999_breaking.py").write_text(BREAKING.format(newest=revisions.newest()))
    monkeypatch.setattr(revisions, "MIGRATIONS", later)
    with pytest.raises(errors.StoreUnusable, match=r"migration 9999 changes .* 1 rollouts are held"):
        await open_store()
    assert soundness.standing(database.url) == revisions.known()[-2]
    database.ask("UPDATE rollouts SET lease_until = 1")
    await (await open_store()).close()
    assert soundness.standing(database.url) == "9999"
    await running.close()
    monkeypatch.undo()
    with pytest.raises(errors.StoreUnusable, match="closed to it"):
        await open_store()


def test_an_empty_database_stands_at_no_revision(database: Database):
    url = database.beside("empty.db")
    if database.is_sqlite:
        with pytest.raises(errors.StoreUnusable, match="no database at"):
            soundness.standing(url)
    else:
        assert soundness.standing(url) is None
        assert soundness.complaints(url)[0].startswith("the schema is at none, behind")


def test_what_is_declared_has_a_name():
    """A nameless constraint could not be missed by name, nor dropped by a later migration."""
    for table in schema.metadata.sorted_tables:
        assert all(constraint.name for constraint in table.constraints), table.name
