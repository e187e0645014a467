from __future__ import annotations

import pytest

from orchestrator import errors, states
from orchestrator.states import State
from store import schema


def test_the_edges_are_exactly_those_of_the_design():
    edges = {(s.value, t, d.value) for (s, t), d in states.EDGES.items()}
    assert edges == {
        ("created", "provision", "sandbox_ready"),
        ("sandbox_ready", "start_agent", "agent_running"),
        ("agent_running", "take_patch", "patched"),
        ("patched", "grade", "graded"),
        ("graded", "release", "released"),
        ("sandbox_ready", "restart", "created"),
        ("agent_running", "restart", "created"),
        ("patched", "restart", "created"),
        ("created", "fail", "failed"),
        ("sandbox_ready", "fail", "failed"),
        ("agent_running", "fail", "failed"),
        ("patched", "fail", "failed"),
    }


def test_a_graded_rollout_cannot_fail():
    with pytest.raises(errors.IllegalTransition, match="fail"):
        states.step(State.GRADED, "fail")


def test_nothing_leaves_a_terminal_state():
    assert {src for src, _ in states.EDGES}.isdisjoint(states.TERMINAL)


def test_an_unknown_trigger_is_refused_with_the_edges_that_exist():
    with pytest.raises(errors.IllegalTransition) as refused:
        states.step(State.CREATED, "explode")
    assert "provision" in refused.value.hint


def test_the_store_spells_the_states_like_the_machine():
    assert set(schema.STATES) == {s.value for s in State}
    assert set(schema.TERMINAL) == {s.value for s in states.TERMINAL}


def test_the_diagram_shows_every_edge():
    drawn = states.diagram()
    for (src, trigger), dst in states.EDGES.items():
        assert f"{src.value} --> {dst.value}: {trigger}" in drawn


def test_the_library_still_keys_states_by_the_strings_we_pass():
    assert states.MACHINE.get_triggers("graded") == ["release"]
