from __future__ import annotations

from typing import Any

from orchestrator import errors


def subclasses(cls: type[errors.RolloutsError]) -> set[Any]:
    found: set[Any] = set(cls.__subclasses__())
    return found.union(*(subclasses(c) for c in found))


def test_every_grade_outcome_has_one_row():
    assert set(errors.GRADE_RULES) == set(errors.GradeOutcome)


def test_every_failure_class_has_a_budget_row_and_one_error():
    assert set(errors.FAILURE_BUDGETS) == set(errors.FailureClass)
    raised = [cls.failure_class for cls in subclasses(errors.Failure)]
    assert sorted(raised) == sorted(errors.FailureClass)


def test_only_a_resolved_instance_is_worth_one():
    worth_one = [o for o, rule in errors.GRADE_RULES.items() if rule.reward == 1.0]
    assert worth_one == [errors.GradeOutcome.RESOLVED]


def test_no_reward_exists_without_a_verdict():
    assert all(rule.verdict or rule.reward is None for rule in errors.GRADE_RULES.values())


def test_an_unforeseen_failure_is_never_retried():
    assert errors.Failure("x").budget is None


def test_every_error_of_the_tree_carries_a_hint():
    for cls in subclasses(errors.RolloutsError):
        assert cls("what happened", hint="do this").hint == "do this"
