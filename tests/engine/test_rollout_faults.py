"""What fails is repeated from the right budget, and then costs one sample."""

import asyncio

import pytest

from opdkit.engine.infrastructure_budget import MAX_INFRASTRUCTURE_ERRORS
from opdkit.engine.scheduling import (
    RolloutConfig,
    RolloutOutput,
    RolloutRequest,
    Scheduler,
    make_scheduler,
)
from opdkit.engine.testing import (
    RecordingQueue,
    ScriptedReply,
    ScriptedTeacher,
    VirtualTimeLoop,
    parse_reply,
)
from opdkit.engine.testing.letter_template import END
from opdkit.protocols.errors import (
    DeadlineExceeded,
    GenerationError,
    QueueClosed,
    ReplicaLost,
    TeacherAlignmentError,
)
from opdkit.protocols.messages import (
    DeadSample,
    RolloutOutcome,
    SampleMeta,
    VersionSpan,
)
from tests.conftest import Run
from tests.engine.rollout_setup import (
    Setup,
    counters,
    make_task,
    run_one,
    sampled_ids,
)

SINGLE = make_scheduler("single_turn", {})
LOST = ReplicaLost("replica r1 died")


def test_a_failed_attempt_is_repeated_with_another_seed(run: Run) -> None:
    fault = GenerationError("other prompt ids")
    replies = [ScriptedReply(token_ids=(1, 2), error=fault), parse_reply("y:[3]")]
    setup = Setup(replies, SINGLE, max_attempts=2)
    outcome = run_one(run, setup)
    assert isinstance(outcome, SampleMeta)
    assert (outcome.num_generated_tokens, outcome.num_wasted_tokens) == (1, 2)
    assert len({request.seed for request in setup.student.requests}) == 2
    assert counters(run, setup)["retries"] == 1


def test_attempts_run_out_into_a_dead_letter_that_has_their_tokens(run: Run) -> None:
    fault = GenerationError("other prompt ids")
    setup = Setup([ScriptedReply(token_ids=(1, 2), error=fault)] * 3, SINGLE, max_attempts=3)
    dead = run_one(run, setup)
    assert isinstance(dead, DeadSample)
    assert (dead.reason, dead.message) == ("GenerationError", "other prompt ids")
    assert (dead.num_attempts, dead.num_generated_tokens) == (3, 6)
    assert "Traceback" in dead.traceback
    assert "prompt ids" in dead.traceback


def test_a_dead_replica_s_tokens_are_kept_with_their_version(run: Run) -> None:
    replies = [
        ScriptedReply(token_ids=(1, 2), policy_version=4, error=LOST),
        ScriptedReply(token_ids=(3, END), policy_version=5),
    ]
    setup = Setup(replies, SINGLE, max_new_tokens=9)
    outcome = run_one(run, setup)
    assert isinstance(outcome, SampleMeta)
    (segment,) = setup.segments()
    assert sampled_ids(segment) == [1, 2, 3, END]
    assert segment.spans == tuple(VersionSpan(policy_version=v, num_tokens=2) for v in (4, 5))  # type: ignore[arg-type]
    assert (outcome.oldest_version, outcome.num_generated_tokens) == (4, 4)
    first, second = setup.student.requests
    assert second.token_ids[len(first.token_ids) :] == segment.token_ids[-16:-8]
    assert (first.max_tokens, second.max_tokens) == (9, 7)
    assert counters(run, setup)["infrastructure_retries"] == 1


def test_an_aborted_reply_goes_on_elsewhere(run: Run) -> None:
    aborted = ScriptedReply(token_ids=(1,), finish_reason="abort")
    setup = Setup([aborted, parse_reply("y:[2]")], SINGLE)
    run_one(run, setup)
    assert sampled_ids(setup.segments()[0]) == [1, 2]


def test_a_reply_that_was_whole_when_its_replica_died_needs_no_other(run: Run) -> None:
    lost = ScriptedReply(token_ids=(1, 2), error=LOST)
    setup = Setup([lost], SINGLE, max_new_tokens=2)
    outcome = run_one(run, setup)
    assert isinstance(outcome, SampleMeta)
    assert outcome.finish_reason == "length"


def test_infrastructure_errors_do_not_use_up_attempts(run: Run) -> None:
    replies = [ScriptedReply(error=LOST)] * MAX_INFRASTRUCTURE_ERRORS
    setup = Setup([*replies, parse_reply("y:[3]")], SINGLE, max_attempts=1)
    assert isinstance(run_one(run, setup), SampleMeta)


def test_a_student_that_serves_nobody_is_not_the_sample_s_fault(run: Run) -> None:
    replies = [ScriptedReply(error=LOST)] * (MAX_INFRASTRUCTURE_ERRORS + 1)
    setup = Setup(replies, SINGLE)
    with pytest.raises(ReplicaLost, match="r1 died"):
        run(setup.rollouts.run(make_task()))
    assert counters(run, setup)["unfinished"] == 1


def test_a_sample_that_alone_is_not_served_is_a_dead_letter() -> None:
    poison = [ScriptedReply(delay_s=1.0, error=LOST)] * (MAX_INFRASTRUCTURE_ERRORS + 1)
    good = ScriptedReply(token_ids=(1, 2), delay_s=2.0)
    setup = Setup([good], SINGLE, by_session={"bad": poison})

    async def scenario() -> RolloutOutcome:
        async with asyncio.TaskGroup() as tasks:
            bad = tasks.create_task(setup.rollouts.run(make_task("bad")))
            tasks.create_task(setup.rollouts.run(make_task("good")))
        return bad.result()

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        dead = runner.run(scenario())
    assert isinstance(dead, DeadSample)
    assert dead.reason == "ReplicaLost"


class AsksItself(Scheduler):
    """Overrides the loop, as a user's would."""

    async def run(self, request: RolloutRequest, config: RolloutConfig) -> RolloutOutput:
        """Sample one reply."""
        await config.generate(request)
        return config.output(request)


@pytest.mark.parametrize("scheduler", [SINGLE, AsksItself()])
def test_an_unknown_error_of_the_student_is_raised_as_it_is(run: Run, scheduler: Scheduler) -> None:
    bug = TypeError("a bug of the client")
    setup = Setup([ScriptedReply(token_ids=(1,), error=bug)] * 3, scheduler, max_attempts=3)
    with pytest.raises(TypeError, match="a bug of the client"):
        run(setup.rollouts.run(make_task()))
    assert len(setup.student.requests) == 1


def test_an_override_of_run_does_not_hide_what_ails_the_student(run: Run) -> None:
    replies = [ScriptedReply(error=LOST)] * (MAX_INFRASTRUCTURE_ERRORS + 1)
    with pytest.raises(ReplicaLost):
        run(Setup(replies, AsksItself()).rollouts.run(make_task()))


def test_a_teacher_that_is_away_is_asked_again_without_sampling_anew(run: Run) -> None:
    teacher = ScriptedTeacher(errors=[DeadlineExceeded("score"), ReplicaLost("teacher")])
    setup = Setup(["x:[1,2]"], SINGLE, teacher=teacher)
    assert isinstance(run_one(run, setup), SampleMeta)
    assert len(setup.student.requests) == 1
    assert len(teacher.requests) == 3


def test_a_failed_attempt_leaves_its_task_unmarked(run: Run) -> None:
    async def scenario() -> int:
        teacher = ScriptedTeacher(errors=[TeacherAlignmentError("33 ids for 32")])
        await Setup(["x:[1,2]"], SINGLE, teacher=teacher).rollouts.run(make_task())
        current = asyncio.current_task()
        assert current is not None
        return current.cancelling()  # more than 0 would break every timeout around it

    assert run(scenario()) == 0


def test_misaligned_scores_cost_the_attempt(run: Run) -> None:
    teacher = ScriptedTeacher(errors=[TeacherAlignmentError("33 ids for 32")])
    setup = Setup(["x:[1,2]", "y:[3]"], SINGLE, teacher=teacher, max_attempts=2)
    assert isinstance(run_one(run, setup), SampleMeta)
    assert sampled_ids(setup.segments()[0]) == [3]


@pytest.mark.parametrize(
    ("teacher", "reason"),
    [
        (ScriptedTeacher(num_extra_positions=1), "TeacherAlignmentError"),
        (ScriptedTeacher(logprob=float("nan")), "NonFiniteScoresError"),
        (ScriptedTeacher(logprob=float("inf")), "NonFiniteScoresError"),
    ],
)
def test_scores_that_cannot_be_trained_on_are_not_queued(
    run: Run, teacher: ScriptedTeacher, reason: str
) -> None:
    setup = Setup(["x:[1,2]"], SINGLE, teacher=teacher)
    dead = run_one(run, setup)
    assert isinstance(dead, DeadSample)
    assert dead.reason == reason
    assert not setup.train_queue.metas


def test_minus_infinity_is_a_score(run: Run) -> None:
    setup = Setup(["x:[1,2]"], SINGLE, teacher=ScriptedTeacher(logprob=-float("inf")))
    assert isinstance(run_one(run, setup), SampleMeta)


def test_a_closed_queue_ends_the_trajectory(run: Run) -> None:
    class Closed(RecordingQueue):
        async def put(self, meta: SampleMeta, payload: bytes) -> None:
            raise QueueClosed

    setup = Setup(["x:[1,2]"], SINGLE, train_queue=Closed())
    with pytest.raises(QueueClosed):
        run(setup.rollouts.run(make_task()))


def test_a_sample_that_the_queue_did_not_take_is_offered_again(run: Run) -> None:
    class Flaky(RecordingQueue):
        num_calls = 0

        async def put(self, meta: SampleMeta, payload: bytes) -> None:
            self.num_calls += 1
            if self.num_calls == 1:
                raise DeadlineExceeded("queue.put")
            await super().put(meta, payload)

    setup = Setup(["x:[1,2]"], SINGLE, train_queue=Flaky())
    assert isinstance(run_one(run, setup), SampleMeta)
    assert len(setup.student.requests) == 1
