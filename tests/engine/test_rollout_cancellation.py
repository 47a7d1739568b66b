"""A cancelled trajectory leaves nothing."""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from opdkit.engine.scheduling import (
    Choice,
    RolloutOutput,
    RolloutRequest,
)
from opdkit.engine.testing import (
    RecordingQueue,
    ScriptedTeacher,
    VirtualTimeLoop,
)
from opdkit.protocols.errors import TeacherAlignmentError
from opdkit.protocols.messages import ScoreRequest, TeacherScores
from tests.conftest import Run
from tests.engine.rollout_setup import (
    Compresses,
    GoesOn,
    Setup,
    make_task,
)


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


def test_a_cancellation_is_not_lost_in_another_failure(run: Run) -> None:
    class Disguises(ScriptedTeacher):
        async def score(self, request: ScoreRequest) -> TeacherScores:
            scores = await super().score(request)
            if len(self.requests) == 1:  # a second attempt would be answered
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    raise TeacherAlignmentError("half an answer") from None
            return scores

    setup = Setup(["x:[1,2]", "y:[3]"], GoesOn(), max_turns=1, max_attempts=2, teacher=Disguises())

    async def scenario() -> bool:
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(setup.rollouts.run(make_task()))
            await setup.teacher.asked.wait()
            for _ in range(3):
                await asyncio.sleep(0)  # until the teacher waits
            task.cancel()
        return task.cancelled()

    assert run(scenario())
    assert len(setup.student.requests) == 1
