"""The scripted parts refuse what a real one would, and repeat exactly."""

import pytest

from opdkit.engine.packing import plan_step
from opdkit.engine.sample_queue import LeaseQueue
from opdkit.engine.testing.clocks import FakeClock
from opdkit.engine.testing_messages import make_meta
from opdkit.engine.testing_run import FakePublisher, FakeRunner, FakeTrainer
from opdkit.protocols.errors import TrainerError
from opdkit.protocols.ids import Ordinal, PolicyVersion
from opdkit.protocols.messages import Demand, RolloutTask, SampleMeta, StepPlan
from tests.conftest import Run


def make_plan(step: int = 0) -> StepPlan:
    return plan_step([make_meta(0)], step=step, data_parallel_size=1, microbatch_tokens=99)


def make_queue() -> LeaseQueue:
    return LeaseQueue(max_samples=9, max_bytes=999, clock=FakeClock())


def make_task(ordinal: int, *, held_out: bool = False) -> RolloutTask:
    return RolloutTask(
        sample_id=f"sample-{ordinal}",
        ordinal=Ordinal(ordinal),
        due_step=3,
        prompt_id="prompt",
        row={},
        seed=ordinal,
        held_out=held_out,
    )


def test_a_plan_that_was_not_prefetched_cannot_be_trained(run: Run) -> None:
    with pytest.raises(AssertionError, match="step 0 was not prefetched"):
        run(FakeTrainer().train(make_plan()))


def test_a_prefetch_needs_the_leased_payload(run: Run) -> None:
    async def scenario() -> None:
        queue = make_queue()
        trainer = FakeTrainer(queue=queue)
        await queue.put(make_meta(0), b"payload")
        with pytest.raises(ValueError, match="sample 'sample-0' is not leased"):
            await trainer.prefetch(make_plan())
        await queue.set_demand(Demand(count=1))
        await queue.lease()
        await trainer.prefetch(make_plan())
        assert (await trainer.train(make_plan())).num_supervised == 2

    run(scenario())


def test_a_scripted_failure_comes_once_and_makes_no_version(run: Run) -> None:
    async def scenario() -> None:
        trainer = FakeTrainer(failing_steps=[0])
        await trainer.prefetch(make_plan())
        with pytest.raises(TrainerError, match="scripted failure at step 0"):
            await trainer.train(make_plan())
        assert trainer.policy_version == 0
        await trainer.train(make_plan())
        assert trainer.policy_version == 1

    run(scenario())


def test_another_trainer_loads_what_one_saved(run: Run) -> None:
    async def scenario() -> None:
        disk = dict[str, PolicyVersion]()
        trainer = FakeTrainer(disk=disk)
        await trainer.prefetch(make_plan())
        await trainer.train(make_plan())
        await trainer.save("here")
        another = FakeTrainer(disk=disk)
        await another.load("here")
        assert another.policy_version == 1

    run(scenario())


def test_a_task_gives_the_same_sample_again_in_its_own_queue(run: Run) -> None:
    async def scenario() -> None:
        queue, evaluation_queue = make_queue(), make_queue()
        runner = FakeRunner(
            queue,
            publisher=FakePublisher(),
            evaluation_queue=evaluation_queue,
            dead_ordinals=[1],
        )
        first = await runner.run(make_task(0))
        again = await runner.run(make_task(0))
        assert isinstance(first, SampleMeta)
        assert first == again
        await runner.run(make_task(1, held_out=True))  # the script is of the trained ones
        assert queue.depth.num_samples == evaluation_queue.depth.num_samples == 1
        assert (await runner.report()).num_in_flight_tokens == 0

    run(scenario())
