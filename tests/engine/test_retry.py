"""Budgets end when they are spent, and windows forget."""

import pytest

from opdkit.engine.retry import Budget, are_too_many_dead


def test_a_budget_allows_its_limit_and_no_more() -> None:
    budget = Budget(limit=2)
    assert [budget.spend(now_s=0.0) for _ in range(4)] == [True, True, False, False]


def test_a_budget_of_nothing_allows_nothing() -> None:
    assert not Budget(limit=0).spend(now_s=0.0)
    assert not Budget(limit=0, window_s=5.0).spend(now_s=0.0)


def test_failures_outside_the_window_are_forgotten() -> None:
    budget = Budget(limit=2, window_s=10.0)
    assert [budget.spend(now_s=t) for t in (0.0, 1.0, 10.0, 10.5, 20.0)] == [
        True,
        True,
        True,  # the one at 0 s is 10 s old
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"limit": -1}, "limit must be at least 0, got -1"),
        ({"limit": 1, "window_s": 0.0}, "window_s must be above 0, got 0"),
    ],
)
def test_a_budget_that_makes_no_sense_is_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Budget(**arguments)


@pytest.mark.parametrize(
    ("num_dead", "num_drawn", "too_many"),
    [
        (9, 9, False),  # too early to tell
        (10, 10, True),
        (5, 50, False),  # as many as may
        (6, 50, True),
        (0, 50, False),
    ],
)
def test_the_share_of_dead_samples_is_judged_after_a_minimum(
    num_dead: int, num_drawn: int, too_many: bool
) -> None:
    verdict = are_too_many_dead(
        num_dead=num_dead, num_drawn=num_drawn, max_dead_fraction=0.1, min_drawn=10
    )
    assert verdict is too_many
