"""The rollout state machine, on one page; the store's compare-and-set is the authority over it.

created -> sandbox_ready -> agent_running -> patched -> graded -> released
   ^            |                |              |
   +--restart---+----------------+--------------+     (new attempt)
created, sandbox_ready, agent_running, patched --fail--> failed
"""

from __future__ import annotations

from enum import StrEnum

from transitions import Machine
from transitions.extensions import GraphMachine

from orchestrator import errors

FSM_VERSION = 1


class State(StrEnum):
    """Where a rollout is. The docstring under each member says what is true and what recovery does."""

    CREATED = "created"
    """Task, configuration and identity are stored. Recovery settles open sandbox intents, then provisions."""
    SANDBOX_READY = "sandbox_ready"
    """A live ledger row names the task sandbox. Recovery restarts unless the sandbox is provably untouched."""
    AGENT_RUNNING = "agent_running"
    """The agent may have edited the repository. Recovery restarts, or fails when the model session is gone."""
    PATCHED = "patched"
    """The patch is stored and the task sandbox given up. Recovery grades; the agent never runs again."""
    GRADED = "graded"
    """Reward and stats are stored for good. Recovery returns them and releases; this state cannot fail."""
    RELEASED = "released"
    """Every sandbox of the rollout is closed with proof. Terminal."""
    FAILED = "failed"
    """No reward will ever exist. What is left of its sandboxes is released by a sweep. Terminal."""


TERMINAL = frozenset({State.RELEASED, State.FAILED})

_LINE = [
    ("provision", State.CREATED, State.SANDBOX_READY),
    ("start_agent", State.SANDBOX_READY, State.AGENT_RUNNING),
    ("take_patch", State.AGENT_RUNNING, State.PATCHED),
    ("grade", State.PATCHED, State.GRADED),
    ("release", State.GRADED, State.RELEASED),
]
_RESTART = [("restart", s, State.CREATED) for s in (State.SANDBOX_READY, State.AGENT_RUNNING, State.PATCHED)]
_FAIL = [
    ("fail", s, State.FAILED)
    for s in (State.CREATED, State.SANDBOX_READY, State.AGENT_RUNNING, State.PATCHED)
]

# The library keys states by value strings: handed Enum members it would name them by `.name`.
MACHINE = Machine(
    model=None,
    states=[s.value for s in State],
    initial=State.CREATED.value,
    transitions=[[trigger, src.value, dst.value] for trigger, src, dst in _LINE + _RESTART + _FAIL],
    auto_transitions=False,
)

EDGES: dict[tuple[State, str], State] = {
    (State(src), trigger): State(str(edge.dest))
    for trigger, event in MACHINE.events.items()
    for src, edges in event.transitions.items()
    for edge in edges
}
"""(source, trigger) -> destination, exported once from the declared machine; migrations seed `fsm_edges` from it."""


def step(source: State, trigger: str) -> State:
    """Return the state that `trigger` leads to; raises `errors.IllegalTransition` where no edge exists."""
    try:
        return EDGES[source, trigger]
    except KeyError:
        raise errors.IllegalTransition(
            f"no edge {trigger!r} leaves state {source.value!r}",
            hint=f"edges from here: {', '.join(t for s, t in EDGES if s is source) or 'none, it is terminal'}",
        ) from None


def diagram() -> str:
    """Return the machine as a Mermaid state diagram, drawn by `transitions` from the table above."""
    drawn = GraphMachine(
        states=list(MACHINE.states),
        transitions=[[trigger, src.value, dst.value] for (src, trigger), dst in EDGES.items()],
        initial=State.CREATED.value,
        auto_transitions=False,
        graph_engine="mermaid",
    )
    arrows = [line.strip() for line in drawn.get_graph().draw(None).splitlines() if "-->" in line]
    return "\n".join(["stateDiagram-v2", *(f"  {arrow}" for arrow in arrows)])
