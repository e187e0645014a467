from __future__ import annotations

from orchestrator import errors, provenance
from orchestrator.errors import GradeOutcome

REFERENCE_KEYS = [
    "n_steps",
    "n_llm_calls",
    "n_tool_calls",
    "n_format_errors",
    "n_cmd_timeouts",
    "n_truncated_obs",
    "prompt_tokens",
    "completion_tokens",
    "llm_time_s",
    "tool_time_s",
    "env_create_s",
    "grade_s",
    "total_s",
    "patch_bytes",
    "patch_files",
    "patch_empty",
    "resolved",
    "f2p_pass",
    "f2p_total",
    "p2p_pass",
    "p2p_total",
    "exit_reason",
    "grade_outcome",
    "mask_sample",
]


def facts() -> provenance.Facts:
    grade = {
        "outcome": "resolved", "mask_sample": 0, "ended_at": 61_500, "duration_s": 2.5,
        "f2p_pass": 2, "f2p_total": 2, "p2p_pass": 7, "p2p_total": 8,
    }  # fmt: skip
    step = {
        "tool_calls": 2, "format_errors": 1, "command_timeouts": 0, "truncated_observations": 1, "tool_ms": 1250,
    }  # fmt: skip
    call = {"prompt_tokens": 100, "completion_tokens": 20, "duration_ms": 400}
    return provenance.Facts(
        rollout={"created_at": 1_500},
        grade=grade,
        grades=[{"duration_s": 0.5}, grade],
        patch={"size": 321, "files": 3, "exit_reason": "step_limit"},
        steps=[step, step, step],
        llm_calls=[call, call, call, call],
        sandboxes=[
            {"intent_at": 0, "live_at": 250},
            {"intent_at": 1000, "live_at": 2000},
            {"intent_at": 5000, "live_at": None},
        ],
    )


def test_every_key_of_the_reference_is_declared_once():
    assert sorted(s.name for s in provenance.STATS) == sorted(REFERENCE_KEYS)


def test_every_number_follows_from_the_rows_of_all_attempts():
    assert provenance.stats_of(facts()) == {
        "n_steps": 3, "n_llm_calls": 4, "n_tool_calls": 6, "n_format_errors": 3, "n_cmd_timeouts": 0,
        "n_truncated_obs": 3, "prompt_tokens": 400, "completion_tokens": 80, "llm_time_s": 1.6, "tool_time_s": 3.75,
        "env_create_s": 1.25, "grade_s": 3.0, "total_s": 60.0, "patch_bytes": 321, "patch_files": 3, "patch_empty": 0,
        "resolved": 1, "f2p_pass": 2, "f2p_total": 2, "p2p_pass": 7, "p2p_total": 8, "exit_reason": "step_limit",
        "grade_outcome": "resolved", "mask_sample": 0,
    }  # fmt: skip


def test_a_masked_sample_has_no_number():
    for outcome in GradeOutcome:
        assert provenance.reward_of(outcome, masked=True) is None


def test_rewards_follow_the_outcome_table():
    given = {o: provenance.reward_of(o, masked=False) for o in GradeOutcome}
    assert given[GradeOutcome.RESOLVED] == 1.0
    assert all(given[o] is None for o, rule in errors.GRADE_RULES.items() if not rule.verdict)
    assert {given[o] for o, rule in errors.GRADE_RULES.items() if rule.verdict} == {0.0, 1.0}
