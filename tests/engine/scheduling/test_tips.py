"""A wrong answer gets a tip, and what the student did not say is not trained."""

import pytest

from opdkit.engine.scheduling import RolloutRequest, make_scheduler
from opdkit.engine.scheduling.math_tips import MathTips
from opdkit.engine.testing import LetterTemplate
from opdkit.engine.testing.letter_template import END
from opdkit.protocols.messages import SampleMeta
from tests.conftest import Run
from tests.engine.rollout_setup import Setup, ids_of, make_task, sampled_ids

WRONG, RIGHT = "41:[1,2]", "42:[3]"


def run_one(run: Run, setup: Setup) -> SampleMeta:
    outcome = run(setup.rollouts.run(make_task(solution="42")))
    assert isinstance(outcome, SampleMeta)
    return outcome


def test_a_right_answer_gets_no_tip(run: Run) -> None:
    setup = Setup([RIGHT], make_scheduler("math_tips", {}))
    assert run_one(run, setup).num_turns == 1


def test_a_wrong_answer_goes_on_after_the_tip(run: Run) -> None:
    setup = Setup([WRONG, RIGHT], MathTips(tip=" no "))
    assert run_one(run, setup).num_turns == 2
    (segment,) = setup.segments()
    assert sampled_ids(segment) == [1, 2, 3]
    assert ids_of(segment)[-7:] == [1, 2, *LetterTemplate().encode(" no "), 3]


def test_tips_run_out(run: Run) -> None:
    setup = Setup([WRONG] * 5, MathTips(tip=" no ", max_tips=2))
    assert run_one(run, setup).num_turns == 3


def test_a_reply_that_was_cut_gets_no_tip(run: Run) -> None:
    setup = Setup([WRONG + "/len"], MathTips())
    outcome = run_one(run, setup)
    assert (outcome.num_turns, outcome.finish_reason) == (1, "length")


def test_the_end_that_the_student_sampled_is_trained_where_it_was_sampled(run: Run) -> None:
    setup = Setup([f"41:[1,2,{END}]", f"42:[3,{END}]"], MathTips(tip=" no "))
    outcome = run_one(run, setup)
    first, second = setup.segments()
    assert sampled_ids(first) == [1, 2, END]
    assert sampled_ids(second) == [3, END]
    assert ids_of(second)[: first.num_tokens - 1] == ids_of(first)[:-1]
    assert outcome.num_generated_tokens == outcome.num_supervised == 5


def test_thinking_is_forgotten_and_each_turn_is_a_segment(run: Run) -> None:
    thought = "<think>m</think>41:[1,2]"
    setup = Setup([thought, RIGHT], make_scheduler("thinking_tips", {"tip": "again"}))
    assert run_one(run, setup).num_turns == 2
    first, second = setup.segments()
    assert sampled_ids(first) == [1, 2]
    assert sampled_ids(second) == [3]
    expected = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "41"},
        {"role": "user", "content": "again"},
    ]
    assert ids_of(second)[:-1] == setup.template.render(expected)


@pytest.mark.parametrize("name", ["math_tips", "thinking_tips"])
def test_a_row_without_a_solution_is_a_dead_letter_that_says_so(run: Run, name: str) -> None:
    setup = Setup([WRONG], make_scheduler(name, {}))
    dead = run(setup.rollouts.run(make_task()))
    assert "KeyError: 'solution'" in dead.message


def test_a_request_does_not_share_the_row() -> None:
    row = {"messages": [{"role": "user", "content": "q"}], "solution": ["1"]}
    request = RolloutRequest.from_row(row)
    request.messages.append({"role": "assistant", "content": "x"})
    request.data_dict["solution"].append("2")
    assert row == {"messages": [{"role": "user", "content": "q"}], "solution": ["1"]}
