"""Guards that hold whoever writes: history is append-only, terminal rollouts never move, every move is an edge."""

from __future__ import annotations

from dataclasses import dataclass

APPEND_ONLY = ("transitions", "grades", "rewards", "patches", "steps", "llm_calls", "fsm_edges", "deliveries")
"""Tables whose rows are never updated or deleted."""

KEPT = ("rollouts", "attempts", "sandboxes", "tasks", "artifacts", "validations", "workers")
"""Tables whose rows may change but never go."""


@dataclass(frozen=True, slots=True)
class Guard:
    """Refuses an event on a table with a message; `when` is a condition over OLD and NEW, the same on both engines.

    With `looks_up`, an update's `when` asks another table: PostgreSQL asks it once for all rows of the statement.
    `when_printed` is `when` as PostgreSQL prints it: there the trigger itself asks it, which costs a row far less than
    a call of its function.
    """

    name: str
    event: str
    table: str
    message: str
    when: str = ""
    looks_up: bool = False
    when_printed: str = ""


GUARDS = (
    *(Guard(f"{table}_no_update", "UPDATE", table, f"{table} is append-only") for table in APPEND_ONLY),
    *(
        Guard(f"{table}_no_delete", "DELETE", table, f"{table} keeps its rows")
        for table in APPEND_ONLY + KEPT
    ),
    Guard(
        "rollouts_terminal",
        "UPDATE",
        "rollouts",
        "a released or failed rollout is immutable",
        "OLD.state IN ('released', 'failed')",
        when_printed="old.state = ANY (ARRAY['released'::text, 'failed'::text])",
    ),
    Guard(
        "rollouts_edge",
        "UPDATE OF state",
        "rollouts",
        "the state machine has no such edge",
        "NEW.state <> OLD.state AND NOT EXISTS"
        " (SELECT 1 FROM fsm_edges WHERE src = OLD.state AND dst = NEW.state)",
        looks_up=True,
    ),
    Guard(
        "rollouts_logged",
        "UPDATE OF state",
        "rollouts",
        "a state change must raise the version by one",
        "NEW.version <> OLD.version + 1",
        when_printed="new.version <> (old.version + 1)",
    ),
    Guard(
        "rollouts_born",
        "INSERT",
        "rollouts",
        "a rollout begins in created",
        "NEW.state <> 'created' OR NEW.version <> 0",
    ),
)


def sqlite(guard: Guard) -> str:
    """Return the CREATE TRIGGER statement for SQLite."""
    when = f" WHEN {guard.when}" if guard.when else ""
    return (
        f"CREATE TRIGGER {guard.name} BEFORE {guard.event} ON {guard.table}{when}"
        f" BEGIN SELECT RAISE(ABORT, '{guard.message}'); END"
    )


def postgresql(guard: Guard) -> tuple[str, str]:
    """Return the CREATE FUNCTION and CREATE TRIGGER statements for PostgreSQL (its WHEN takes no subquery)."""
    if guard.looks_up:
        when = guard.when.replace("OLD.", "was.").replace("NEW.", "became.")
        condition = (
            "EXISTS (SELECT 1 FROM became LEFT JOIN was ON was.id = became.id"
            f" WHERE was.id IS NULL OR {when})"
        )
        back, fires = (
            "NULL",
            f"AFTER UPDATE ON {guard.table} REFERENCING OLD TABLE AS was NEW TABLE AS became",
        )
        fires += " FOR EACH STATEMENT"
    else:
        condition, back = guard.when or "true", "OLD" if guard.event == "DELETE" else "NEW"
        fires = f"BEFORE {guard.event} ON {guard.table} FOR EACH ROW"
        if guard.when_printed:
            condition, fires = "true", f"{fires} WHEN ({guard.when_printed})"
    function = (
        f"CREATE FUNCTION {guard.name}() RETURNS trigger LANGUAGE plpgsql AS $guard$ BEGIN"
        f" IF {condition} THEN RAISE EXCEPTION '{guard.message}' USING ERRCODE = 'integrity_constraint_violation';"
        f" END IF; RETURN {back}; END $guard$"
    )
    return function, f"CREATE TRIGGER {guard.name} {fires} EXECUTE FUNCTION {guard.name}()"
