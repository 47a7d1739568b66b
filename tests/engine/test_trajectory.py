"""Turns, segments and limits of a trajectory."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from opdkit.engine.scheduling import (
    Choice,
    RolloutConfig,
    RolloutOutput,
    RolloutRequest,
    Scheduler,
)
from opdkit.engine.testing import (
    LetterTemplate,
    ScriptedReply,
)
from opdkit.protocols.messages import (
    DeadSample,
    SampleMeta,
)
from tests.conftest import Run
from tests.engine.rollout_setup import (
    QUESTION,
    Compresses,
    GoesOn,
    Setup,
    counters,
    ids_of,
    make_task,
    run_one,
    sampled_ids,
)


def test_a_rewritten_history_is_another_segment_with_its_own_prompt(run: Run) -> None:
    setup = Setup(["x:[1,2]", "y:[3]"], Compresses(), max_turns=2)
    outcome = run_one(run, setup)
    first, second = setup.segments()
    render = setup.template.render
    assert ids_of(first) == [*render([QUESTION]), 1, 2]
    assert ids_of(second) == [*render([{"role": "user", "content": "after 1"}]), 3]
    assert isinstance(outcome, SampleMeta)
    assert outcome.num_supervised == outcome.num_generated_tokens == 3
    assert counters(run, setup)["history_rewrites"] == 1


def test_a_closed_segment_is_scored_while_the_next_is_sampled(run: Run) -> None:
    async def scenario() -> None:
        hangs = ScriptedReply(token_ids=(3,), text="y", hangs=True)
        setup = Setup(["x:[1,2]", hangs], Compresses(), max_turns=2)
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(setup.rollouts.run(make_task()))
            await setup.teacher.asked.wait()
            assert not task.done()
            task.cancel()

    run(scenario())


def test_another_request_keeps_the_id_and_the_columns(run: Run) -> None:
    seen: list[tuple[str, Any]] = []

    class Looks(Compresses):
        async def on_turn_end(
            self, request: RolloutRequest, choice: Choice, turn: int
        ) -> Mapping[str, Any] | None:
            seen.append((request.uuid, request.data_dict["level"]))
            return None

    run_one(run, Setup(["x:[1,2]", "y:[3]"], Looks(), max_turns=2), level=5)
    assert len(seen) == 2
    assert len(set(seen)) == 1
    assert seen[0][1] == 5


def test_media_in_the_infos_replace_the_sample_s(run: Run) -> None:
    class Paints(GoesOn):
        async def check_finished(self, request: RolloutRequest, choice: Choice, turn: int) -> bool:
            return bool(request.data_dict["images"] == ["new"])

    scheduler = Paints({"rollout_infos": {"images": ["new"]}}, message="more")
    outcome = run_one(run, Setup(["x:[1]", "y:[2]", "z:[3]"], scheduler), images=["old"])
    assert isinstance(outcome, SampleMeta)
    assert outcome.num_turns == 2


@pytest.mark.parametrize(("own", "of_job", "num_turns"), [(2, 3, 2), (3, 2, 2), (None, 1, 1)])
def test_the_smaller_limit_of_turns_binds(
    run: Run, own: int | None, of_job: int, num_turns: int
) -> None:
    scheduler = GoesOn(message="more")
    scheduler.max_turns = own
    outcome = run_one(run, Setup(["x:[1]", "y:[2]", "z:[3]"], scheduler, max_turns=of_job))
    assert isinstance(outcome, SampleMeta)
    assert outcome.num_turns == num_turns


def test_masks_that_leave_nothing_to_train_are_an_error(run: Run) -> None:
    class TrainsNothing(Scheduler):
        async def run(self, request: RolloutRequest, config: RolloutConfig) -> RolloutOutput:
            await config.generate(request)
            return replace(config.output(request), segments=())

    dead = run_one(run, Setup(["x:[1,2]"], TrainsNothing()))
    assert isinstance(dead, DeadSample)
    assert "no token to train on" in dead.message


class Branches(Scheduler):
    """Overrides the loop: two turns by hand, of which the outputs are two segments."""

    async def run(self, request: RolloutRequest, config: RolloutConfig) -> list[RolloutOutput]:
        """Ask twice, from scratch."""
        outputs: list[RolloutOutput] = []
        for _ in range(2):
            fresh = RolloutRequest(messages=[QUESTION.copy()])
            await config.generate(fresh)
            outputs.append(config.output(fresh))
        last = outputs[-1]
        return [replace(last, segments=(segment,)) for segment in last.segments]


def test_an_override_of_run_may_return_several_segments(run: Run) -> None:
    setup = Setup(["x:[1,2]", "y:[3]"], Branches(), max_turns=2)
    outcome = run_one(run, setup)
    assert isinstance(outcome, SampleMeta)
    assert outcome.num_turns == 2
    assert [sampled_ids(segment) for segment in setup.segments()] == [[1, 2], [3]]
    assert len(setup.teacher.requests) == 2


def test_a_template_s_own_thinking_rule_gives_one_segment_a_turn(run: Run) -> None:
    thought = "<think>m</think>x"
    template = LetterTemplate({(1, 2): thought, (3,): "y"}, strips_thinking=True)
    setup = Setup(
        [f"{thought}:[1,2]", "y:[3]"], GoesOn(message="more"), max_turns=2, template=template
    )
    run_one(run, setup)
    assert [sampled_ids(segment) for segment in setup.segments()] == [[1, 2], [3]]
