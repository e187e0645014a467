"""Guards that hold whoever writes: history is append-only, terminal rollouts never move, every move is an edge."""

from __future__ import annotations

APPEND_ONLY = ("transitions", "grades", "rewards", "patches", "steps", "llm_calls", "fsm_edges")
"""Tables whose rows are never updated or deleted."""

KEPT = ("rollouts", "attempts", "sandboxes", "tasks", "artifacts", "validations", "workers")
"""Tables whose rows may change but never go."""


def sqlite() -> dict[str, str]:
    """Return trigger name -> CREATE TRIGGER statement for SQLite."""
    made = {}
    for table in APPEND_ONLY:
        made[f"{table}_no_update"] = _refuse(
            f"{table}_no_update", f"UPDATE ON {table}", f"{table} is append-only"
        )
    for table in APPEND_ONLY + KEPT:
        made[f"{table}_no_delete"] = _refuse(
            f"{table}_no_delete", f"DELETE ON {table}", f"{table} keeps its rows"
        )
    made["rollouts_terminal"] = _refuse(
        "rollouts_terminal",
        "UPDATE ON rollouts WHEN OLD.state IN ('released', 'failed')",
        "a released or failed rollout is immutable",
    )
    made["rollouts_edge"] = _refuse(
        "rollouts_edge",
        "UPDATE OF state ON rollouts WHEN NEW.state <> OLD.state AND NOT EXISTS"
        " (SELECT 1 FROM fsm_edges WHERE src = OLD.state AND dst = NEW.state)",
        "the state machine has no such edge",
    )
    made["rollouts_logged"] = _refuse(
        "rollouts_logged",
        "UPDATE OF state ON rollouts WHEN NEW.version <> OLD.version + 1",
        "a state change must raise the version by one",
    )
    made["rollouts_born"] = _refuse(
        "rollouts_born",
        "INSERT ON rollouts WHEN NEW.state <> 'created' OR NEW.version <> 0",
        "a rollout begins in created",
    )
    return made


def _refuse(name: str, event: str, message: str) -> str:
    return f"CREATE TRIGGER {name} BEFORE {event} BEGIN SELECT RAISE(ABORT, '{message}'); END"
