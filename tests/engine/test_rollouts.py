"""A trajectory ends as one queued sample or one dead letter, and never as a leak."""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from opdkit.engine.infrastructure_budget import MAX_INFRASTRUCTURE_ERRORS
from opdkit.engine.scheduling import (
    Choice,
    RolloutConfig,
    RolloutOutput,
    RolloutRequest,
    Scheduler,
    make_scheduler,
)
from opdkit.engine.testing import (
    LetterTemplate,
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
    JobFailed,
    QueueClosed,
    ReplicaLost,
    TeacherAlignmentError,
)
from opdkit.protocols.messages import (
    DeadSample,
    RolloutOutcome,
    RolloutWorkerReport,
    SampleMeta,
    SegmentShape,
    VersionSpan,
)
from tests.conftest import Run
from tests.engine.rollout_setup import (
    QUESTION,
    GoesOn,
    KeepsOutputs,
    Setup,
    ids_of,
    make_task,
    sampled_ids,
)

SINGLE = make_scheduler("single_turn", {})
LOST = ReplicaLost("replica r1 died")


def run_one(run: Run, setup: Setup, *, held_out: bool = False, **row: Any) -> RolloutOutcome:
    outcome = run(setup.rollouts.run(make_task(held_out=held_out, **row)))
    assert isinstance(outcome, SampleMeta | DeadSample)
    assert setup.num_open == 0
    return outcome


def counters(run: Run, setup: Setup) -> dict[str, int]:
    report = run(setup.rollouts.report())
    assert isinstance(report, RolloutWorkerReport)
    assert report.num_in_flight_tokens == 0
    return report.counters


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


def test_a_hook_that_meets_an_infrastructure_error_costs_its_trajectory(run: Run) -> None:
    class Remote(Scheduler):
        async def on_turn_end(self, *_: object) -> None:
            raise ReplicaLost("the environment's")

    dead = run_one(run, Setup(["x:[1,2]"], Remote()))
    assert isinstance(dead, DeadSample)
    assert dead.reason == "HookError"


def test_a_failed_task_group_in_a_hook_costs_its_trajectory(run: Run) -> None:
    async def fails() -> None:
        raise ValueError("one tool")

    class Tools(Scheduler):
        async def on_turn_end(self, *_: object) -> None:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(fails())

    setup = Setup(["x:[1,2]"] * 2, Tools(), max_attempts=2)
    dead = run_one(run, setup)
    assert isinstance(dead, DeadSample)
    assert (dead.reason, dead.num_attempts) == ("HookError", 2)
    assert "ValueError: one tool" in dead.traceback


@pytest.mark.parametrize(
    "messages", [[{"role": "assistant", "content": None}], [{"role": "assistant", "content": [1]}]]
)
def test_a_request_that_cannot_be_continued_is_a_hook_s_fault(
    run: Run, messages: list[dict[str, Any]]
) -> None:
    setup = Setup(["x:[1,2]"], GoesOn({"infer_request": RolloutRequest(messages=messages)}))
    dead = run_one(run, setup)
    assert isinstance(dead, DeadSample)
    assert dead.reason == "HookError"


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


class Compresses(GoesOn):
    """Forgets the conversation after every turn."""

    async def step(self, request: RolloutRequest, choice: object, turn: int) -> Mapping[str, Any]:
        """Start over, in another request that brings nothing along."""
        summary = {"role": "user", "content": f"after {turn}"}
        return {"infer_request": RolloutRequest(messages=[summary])}


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


@pytest.mark.parametrize(
    ("hook", "result", "words"),
    [
        ("on_turn_end", [], "on_turn_end must return a mapping, got list"),
        ("on_turn_end", {"done": "yes"}, "done must be True, False or None"),
        ("on_turn_end", {"rollout_infos": 1}, "as rollout_infos, must return a mapping, got int"),
        ("check_finished", None, "check_finished must return a bool"),
        ("step", None, "step must return a mapping, got NoneType"),
        ("step", {"infer_request": {}}, "infer_request must be a request"),
        ("step", {"response_token_ids": []}, "response_token_ids are empty"),
        ("step", {"response_token_ids": "12"}, "response_token_ids must be a list"),
        ("run", [], "run must return a RolloutOutput"),
        ("run", None, "run must return a RolloutOutput"),
    ],
)
def test_what_a_hook_may_not_return_is_named(
    run: Run, hook: str, result: object, words: str
) -> None:
    def returns(*_: object) -> object:
        return result

    scheduler = type("Users", (Scheduler,), {hook: returns})()
    dead = run_one(run, Setup(["x:[1,2]", "y:[3]"], scheduler))
    assert isinstance(dead, DeadSample)
    assert dead.reason == "HookError"
    assert words in dead.message


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


class Hangs(GoesOn):
    """Hangs in one hook."""

    def __init__(self, where: str) -> None:
        super().__init__(message="more")
        self._where = where
        self.seen: list[str] = []

    async def _pass(self, name: str) -> None:
        self.seen.append(name)
        if name == self._where:
            await asyncio.Event().wait()

    async def on_trajectory_start(self, requests: list[RolloutRequest]) -> None:
        """Pass or hang."""
        await self._pass("on_trajectory_start")

    async def on_turn_end(self, request: RolloutRequest, choice: Choice, turn: int) -> None:
        """Pass or hang."""
        await self._pass("on_turn_end")

    async def check_finished(self, request: RolloutRequest, choice: Choice, turn: int) -> bool:
        """Pass or hang."""
        await self._pass("check_finished")
        return False

    async def step(self, request: RolloutRequest, choice: object, turn: int) -> Mapping[str, Any]:
        """Pass or hang, half done."""
        request.messages.append({"role": "user", "content": "half"})
        await self._pass("step")
        return {}

    async def on_trajectory_end(
        self, output: RolloutOutput | Sequence[RolloutOutput], error: BaseException | None
    ) -> None:
        """Pass or hang."""
        await super().on_trajectory_end(output, error)
        await self._pass("on_trajectory_end")


HOOKS = ("on_trajectory_start", "on_turn_end", "check_finished", "step", "on_trajectory_end")


def in_virtual_time(setup: Setup) -> RolloutOutcome:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        outcome = runner.run(setup.rollouts.run(make_task()))
    assert setup.num_open == 0
    return outcome


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_hangs_drops_its_trajectory_and_is_not_tried_again(hook: str) -> None:
    scheduler = Hangs(hook)
    setup = Setup(["x:[1,2]", "y:[3]"], scheduler, max_turns=2, max_attempts=3)
    dead = in_virtual_time(setup)
    assert isinstance(dead, DeadSample)
    assert (dead.reason, dead.num_attempts) == ("HookTimeout", 1)
    assert f"Hangs.{hook} did not return" in dead.message
    assert scheduler.seen.count("on_trajectory_end") == 1


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_hangs_may_fail_the_job(hook: str) -> None:
    setup = Setup(["x:[1,2]", "y:[3]"], Hangs(hook), max_turns=2, on_hook_timeout="fail_job")
    with pytest.raises(JobFailed, match=f"Hangs.{hook}"):
        in_virtual_time(setup)


@pytest.mark.parametrize("hook", ["on_turn_end", "check_finished", "step"])
def test_the_model_may_be_told_that_a_hook_hung(hook: str) -> None:
    scheduler = Hangs(hook)
    setup = Setup(["x:[1,2]", "y:[3]"], scheduler, max_turns=2, on_hook_timeout="error_observation")
    outcome = in_virtual_time(setup)
    assert isinstance(outcome, SampleMeta)
    assert outcome.num_turns == 2
    assert [message["content"] for message in scheduler.outputs[0].messages] == [
        "q",
        "x",
        "Error: no answer within 60 s.",
        "y",
    ]
    assert sampled_ids(setup.segments()[0]) == [1, 2, 3]


def test_a_run_that_hangs_outside_the_engine_is_dropped() -> None:
    class Dawdles(Scheduler):
        async def run(self, request: RolloutRequest, config: RolloutConfig) -> RolloutOutput:
            await config.generate(request)
            await asyncio.Event().wait()
            return config.output(request)

    slow = ScriptedReply(token_ids=(1,), delay_s=600.0)
    dead = in_virtual_time(Setup([slow], Dawdles()))
    assert isinstance(dead, DeadSample)
    assert dead.reason == "HookTimeout"


def test_the_last_hook_sees_what_was_recorded_before_an_error(run: Run) -> None:
    seen: list[tuple[str, list[list[int]]]] = []

    class Fails(GoesOn):
        async def on_trajectory_start(self, requests: list[RolloutRequest]) -> None:
            requests[0].uuid = "mine"

        async def step(
            self, request: RolloutRequest, choice: object, turn: int
        ) -> Mapping[str, Any]:
            raise ValueError

        async def on_trajectory_end(
            self, output: RolloutOutput | Sequence[RolloutOutput], error: BaseException | None
        ) -> None:
            assert isinstance(output, RolloutOutput)
            assert error is not None
            seen.append((output.uuid, output.response_token_ids))

    run_one(run, Setup(["x:[1,2]"], Fails()))
    assert seen == [("mine", [[1, 2]])]


def test_an_error_of_the_last_hook_does_not_hide_the_first(run: Run) -> None:
    class FailsTwice(Scheduler):
        async def on_turn_end(self, *_: object) -> None:
            raise ValueError("first")

        async def on_trajectory_end(self, *_: object) -> None:
            raise ValueError("second")

    setup = Setup(["x:[1,2]"], FailsTwice())
    dead = run_one(run, setup)
    assert isinstance(dead, DeadSample)
    assert dead.message.endswith("ValueError: first")
    assert "second" in dead.traceback
    assert counters(run, setup)["end_hook_errors"] == 1


class Opens(GoesOn):
    """Has an environment a trajectory, and takes its time with it."""

    def __init__(self) -> None:
        super().__init__(message="more")
        self.open: set[str] = set()
        self.num_closed = 0

    async def on_trajectory_start(self, requests: list[RolloutRequest]) -> None:
        """Open it."""
        self.open.add(requests[0].uuid)
        await asyncio.sleep(0)

    async def on_turn_end(self, request: RolloutRequest, choice: Choice, turn: int) -> None:
        """Use it."""
        await asyncio.sleep(0)

    async def on_trajectory_end(
        self, output: RolloutOutput | Sequence[RolloutOutput], error: BaseException | None
    ) -> None:
        """Close it."""
        await asyncio.sleep(0)
        assert isinstance(output, RolloutOutput)
        self.open.discard(output.uuid)
        self.num_closed += 1


class OpensAndCompresses(Opens, Compresses):
    """So that a segment is scored while the next is sampled."""


def test_a_cancellation_at_any_await_leaves_nothing() -> None:
    async def cancel_after(num_iterations: int) -> bool:
        scheduler = OpensAndCompresses()
        setup = Setup(
            ["x:[1,2]", "y:[3,4]"],
            scheduler,
            max_turns=2,
            train_queue=RecordingQueue(is_full=True),
        )
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(setup.rollouts.run(make_task()))
            for _ in range(num_iterations):
                await asyncio.sleep(0)
            is_waiting = setup.train_queue.num_waiting > 0
            task.cancel()
        assert task.cancelled()
        assert setup.num_open == len(scheduler.open) == 0
        assert scheduler.num_closed <= 1
        assert not setup.train_queue.metas
        assert asyncio.all_tasks() == {asyncio.current_task()}
        report = await setup.rollouts.report()
        assert report.num_in_flight_tokens == 0
        generated = report.student.num_generated_tokens
        assert report.counters.get("unfinished_tokens", 0) == generated
        return is_waiting

    num_iterations = 0
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        while not runner.run(cancel_after(num_iterations)):
            num_iterations += 1
            assert num_iterations < 200
    assert num_iterations > 10


def test_a_cancelled_trajectory_does_not_wait_for_its_hook_s_thread(run: Run) -> None:
    entered, release = threading.Event(), threading.Event()

    class Blocks(Opens):
        def step(self, request: RolloutRequest, choice: object, turn: int) -> Mapping[str, Any]:  # type: ignore[override]
            entered.set()
            release.wait()
            return {}

    scheduler = Blocks()
    setup = Setup(["x:[1,2]", "y:[3]"], scheduler)

    async def scenario() -> None:
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(setup.rollouts.run(make_task()))
            await asyncio.to_thread(entered.wait)
            task.cancel()
        assert task.cancelled()

    run(scenario())
    assert not release.is_set()
    assert (len(scheduler.open), scheduler.num_closed) == (0, 1)
    release.set()


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


def test_the_scheduler_named_in_the_error_of_a_hook_is_the_user_s(run: Run) -> None:
    class Mine(KeepsOutputs):
        async def on_turn_end(self, *_: object) -> None:
            raise KeyError("reward")

    dead = run_one(run, Setup(["x:[1,2]"], Mine()))
    assert isinstance(dead, DeadSample)
    assert "Mine.on_turn_end raised KeyError" in dead.message
    assert "in on_turn_end" in dead.traceback


def test_a_template_s_own_thinking_rule_gives_one_segment_a_turn(run: Run) -> None:
    thought = "<think>m</think>x"
    template = LetterTemplate({(1, 2): thought, (3,): "y"}, strips_thinking=True)
    setup = Setup(
        [f"{thought}:[1,2]", "y:[3]"], GoesOn(message="more"), max_turns=2, template=template
    )
    run_one(run, setup)
    assert [sampled_ids(segment) for segment in setup.segments()] == [[1, 2], [3]]
