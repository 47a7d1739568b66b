"""A hook that fails or hangs costs its trajectory, by the job's policy."""

import asyncio
from collections.abc import Mapping, Sequence
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
    ScriptedReply,
)
from opdkit.protocols.errors import (
    JobFailed,
    ReplicaLost,
)
from opdkit.protocols.messages import (
    DeadSample,
    SampleMeta,
)
from tests.conftest import Run
from tests.engine.rollout_setup import (
    GoesOn,
    KeepsOutputs,
    Setup,
    counters,
    in_virtual_time,
    run_one,
    sampled_ids,
)


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


def test_the_scheduler_named_in_the_error_of_a_hook_is_the_user_s(run: Run) -> None:
    class Mine(KeepsOutputs):
        async def on_turn_end(self, *_: object) -> None:
            raise KeyError("reward")

    dead = run_one(run, Setup(["x:[1,2]"], Mine()))
    assert isinstance(dead, DeadSample)
    assert "Mine.on_turn_end raised KeyError" in dead.message
    assert "in on_turn_end" in dead.traceback


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
