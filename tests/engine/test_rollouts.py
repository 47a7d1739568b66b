"""A prompt becomes one queued sample, or a dead letter at once."""

import asyncio

import pytest

from opdkit.engine.scheduling import (
    make_scheduler,
)
from opdkit.engine.testing import (
    ScriptedReply,
    ScriptedTeacher,
    VirtualTimeLoop,
)
from opdkit.engine.testing.letter_template import END
from opdkit.protocols.messages import (
    DeadSample,
    SampleMeta,
    SegmentShape,
)
from tests.conftest import Run
from tests.engine.rollout_setup import (
    QUESTION,
    GoesOn,
    Setup,
    counters,
    ids_of,
    make_task,
    run_one,
    sampled_ids,
)

SINGLE = make_scheduler("single_turn", {})


def test_a_sample_is_scored_and_queued_with_what_the_ledger_needs(run: Run) -> None:
    setup = Setup([f"x:[1,2,{END}]"], SINGLE)
    outcome = run_one(run, setup)
    assert isinstance(outcome, SampleMeta)
    prompt = setup.template.render([QUESTION])
    assert outcome.segments == (SegmentShape(num_tokens=len(prompt) + 3, num_supervised=3),)
    assert (outcome.due_step, outcome.oldest_version, outcome.num_turns) == (3, 0, 1)
    assert (outcome.num_generated_tokens, outcome.num_wasted_tokens) == (3, 0)
    assert outcome.finish_reason == "stop"
    assert not outcome.missing_logprobs
    assert setup.train_queue.metas == [outcome]
    (scored,) = setup.train_queue.samples[0].segments
    assert ids_of(scored.segment) == [*prompt, 1, 2, END]
    (request,) = setup.teacher.requests
    assert list(memoryview(request.positions).cast("i")) == [len(prompt) + i for i in range(3)]


def test_a_held_out_sample_goes_to_the_evaluation(run: Run) -> None:
    setup = Setup(["x:[1,2]"], SINGLE)
    run_one(run, setup, held_out=True)
    assert not setup.train_queue.metas
    assert len(setup.evaluation_queue.metas) == 1


def test_the_student_is_asked_with_the_job_s_settings(run: Run) -> None:
    setup = Setup(["x:[1,2]"], SINGLE, temperature=0.7, max_new_tokens=11, stop_token_ids=(5,))
    run_one(run, setup)
    (request,) = setup.student.requests
    assert (request.temperature, request.max_tokens, request.stop_token_ids) == (0.7, 11, (5,))
    assert request.session_id == "s0"


def test_turns_share_a_session_but_neither_id_nor_seed(run: Run) -> None:
    setup = Setup(["x:[1,2]", "y:[3]"], GoesOn(message="more"), max_turns=2)
    run_one(run, setup)
    requests = setup.student.requests
    assert len({r.session_id for r in requests}) == 1
    assert len({r.request_id for r in requests}) == len({r.seed for r in requests}) == 2


def test_max_tokens_leave_the_reply_within_the_context(run: Run) -> None:
    setup = Setup(["x:[1,2,3,4]"], SINGLE, max_model_len=6)
    outcome = run_one(run, setup)
    assert isinstance(outcome, SampleMeta)
    assert (outcome.num_tokens, outcome.finish_reason) == (6, "length")


@pytest.mark.parametrize("max_model_len", [3, 4])
def test_a_prompt_without_room_for_a_token_is_dead_at_once(run: Run, max_model_len: int) -> None:
    setup = Setup([], SINGLE, max_model_len=max_model_len, max_attempts=3)
    dead = run_one(run, setup)
    assert isinstance(dead, DeadSample)
    assert (dead.reason, dead.num_attempts) == ("PromptError", 1)
    assert f"max_model_len, {max_model_len}" in dead.message


@pytest.mark.parametrize(
    "messages",
    [None, "q", [], ["q"], [{"content": "q"}], [{"role": "assistant", "content": "x"}]],
)
def test_a_row_that_is_no_prompt_is_dead_at_once(run: Run, messages: object) -> None:
    dead = run_one(run, Setup([], SINGLE, max_attempts=3), messages=messages)
    assert isinstance(dead, DeadSample)
    assert (dead.reason, dead.num_attempts) == ("PromptError", 1)


def test_messages_that_the_template_refuses_are_dead_at_once(run: Run) -> None:
    dead = run_one(run, Setup([], SINGLE, max_attempts=3), messages=[{"role": "wizard"}])
    assert isinstance(dead, DeadSample)
    assert (dead.reason, dead.num_attempts) == ("PromptError", 1)


def test_a_full_context_ends_the_trajectory_and_keeps_it(run: Run) -> None:
    setup = Setup(["x:[1,2]", "y:[3]"], GoesOn(message="m" * 40), max_model_len=20)
    outcome = run_one(run, setup)
    assert isinstance(outcome, SampleMeta)
    assert outcome.num_turns == 1
    assert sampled_ids(setup.segments()[0]) == [1, 2]
    assert counters(run, setup)["context_full"] == 1


def test_the_report_measures_the_stages_and_what_is_in_flight() -> None:
    slow = ScriptedReply(token_ids=(1, 2), text="x", delay_s=3.0)
    setup = Setup([slow], SINGLE, teacher=ScriptedTeacher(delay_s=2.0))

    async def scenario() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(setup.rollouts.run(make_task("a")))
            await asyncio.sleep(1)
            tasks.create_task(setup.rollouts.run(make_task("b")))
            await asyncio.sleep(2.5)
            during = await setup.rollouts.report()
        after = await setup.rollouts.report()
        assert during.num_in_flight_tokens == 2
        assert during.student.busy_s == pytest.approx(3.5)
        assert after.num_in_flight_tokens == 0
        assert after.student.busy_s == pytest.approx(4.0)
        assert after.teacher.busy_s == pytest.approx(3.0)
        assert after.student.num_requests == after.teacher.num_requests == 2
        assert after.student.num_generated_tokens == 4
        assert after.loop_lag_p99_s == pytest.approx(0.0)

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(scenario())
    meta = setup.train_queue.metas[0]
    assert [meta.generate_s, meta.score_s] == pytest.approx([3.0, 2.0])
