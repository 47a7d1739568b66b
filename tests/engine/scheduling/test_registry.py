"""Schedulers are found by name, and a slip of the pen is named."""

from typing import Any

import pytest

from opdkit.engine.scheduling import SCHEDULERS, make_scheduler
from opdkit.engine.scheduling.math_tips import MathTips
from opdkit.protocols.errors import ConfigError


@pytest.mark.parametrize("name", sorted(SCHEDULERS))
def test_every_scheduler_is_built_without_options(name: str) -> None:
    assert type(make_scheduler(name, {})) is SCHEDULERS[name]


def test_options_reach_the_scheduler() -> None:
    scheduler = make_scheduler("math_tips", {"max_tips": 3})
    assert isinstance(scheduler, MathTips)
    assert scheduler.max_turns == 4


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("single-turn", {}, "rollout.scheduler is 'single-turn', did you mean 'single_turn'"),
        ("zzz", {}, "known are: math_tips, single_turn, thinking_tips"),
        ("math_tips", {"max_tip": 2}, "scheduler_options.max_tip .* did you mean 'max_tips'"),
        ("single_turn", {"tip": ""}, "scheduler_options.tip .* known are: none"),
        ("math_tips", {"max_tips": 0}, "max_tips is 0, but must be at least 1"),
        ("math_tips", {"tip": ""}, "tip is empty"),
        ("math_tips", {"max_tips": "abc"}, "'abc'}, but 'math_tips' does not take it"),
        ("math_tips", {1: 2}, "scheduler_options.1 is no option of 'math_tips'"),
    ],
)
def test_a_wrong_name_option_or_value_is_refused(
    name: str, options: dict[Any, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        make_scheduler(name, options)
