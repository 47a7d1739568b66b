"""A run trains every sample once, within the lag bound, and leaves nothing behind."""

import msgspec
import pytest

from opdkit.engine.progress_feed import ProgressFeed
from opdkit.engine.run import Run
from opdkit.engine.run_parts import Parts, RunState
from opdkit.engine.sample_queue import LeaseQueue
from opdkit.engine.testing import FakeClock
from opdkit.engine.testing_messages import planned_samples
from opdkit.engine.testing_run import (
    FakePublisher,
    FakeRunner,
    FakeTrainer,
    ListPrompts,
    ListSink,
    MemoryStore,
    Pause,
    loop_turns,
)
from opdkit.protocols.config import EvaluationSection, JobSpec
from opdkit.protocols.config_decoding import decode_job
from opdkit.protocols.errors import JobFailed, TrainerError
from opdkit.protocols.ids import PolicyVersion
from opdkit.protocols.messages import Demand
from tests.conftest import Run as RunFixture


def make_spec(**pipeline: int) -> JobSpec:
    sections: dict[str, object] = {
        "job": {"name": "test"},
        "student": {"model": "student"},
        "teachers": [{"model": "teacher", "max_model_len": 1025}],
        "data": {"train": "prompts.jsonl"},
        "pipeline": {"num_steps": 6, "samples_per_step": 4} | pipeline,
        "checkpoint": {"every_steps": 2},
    }
    return decode_job(sections)


FIVE_TURNS = loop_turns(5)


class DistantQueue(LeaseQueue):
    """A queue that obeys a demand long before its caller hears so."""

    async def set_demand(self, demand: Demand) -> None:
        """Answer late."""
        await super().set_demand(demand)
        await loop_turns(20)()


class Job:
    """A run of fakes, and what they saw."""

    def __init__(
        self,
        spec: JobSpec,
        *,
        num_rows: int = 1000,
        num_epochs: int | None = None,
        queue_samples: int = 64,
        queue_class: type[LeaseQueue] = LeaseQueue,
        held_out: int = 0,
        bad_held_out: range = range(0),
        pause: Pause = FIVE_TURNS,
        dead_ordinals: range = range(0),
        failing_steps: tuple[int, ...] = (),
        skipped_steps: tuple[int, ...] = (),
        store: MemoryStore | None = None,
        disk: dict[str, PolicyVersion] | None = None,
        resume_step: int | None = None,
    ) -> None:
        clock = FakeClock()
        queues = [
            queue_class(max_samples=queue_samples, max_bytes=1 << 20, clock=clock) for _ in range(2)
        ]
        self.publisher = FakePublisher(pause=loop_turns(3))
        self.trainer = FakeTrainer(
            queue=None,
            pause=pause,
            failing_steps=failing_steps,
            skipped_steps=skipped_steps,
            disk=disk,
        )
        self.runner = FakeRunner(
            queues[0],
            publisher=self.publisher,
            evaluation_queue=queues[1],
            dead_ordinals=dead_ordinals,
        )
        self.store = store or MemoryStore()
        self.sink = ListSink()
        self.queue = queues[0]
        parts = Parts(
            prompts=ListPrompts(num_rows, num_epochs=num_epochs),
            held_out=ListPrompts(held_out, bad_rows=bad_held_out) if held_out else None,
            runner=self.runner,
            queue=queues[0],
            evaluation_queue=queues[1],
            trainer=self.trainer,
            publisher=self.publisher,
            store=self.store,
            sink=self.sink,
            feed=ProgressFeed(),
            clock=clock,
        )
        state = None
        if resume_step is not None:
            state = msgspec.msgpack.decode(self.store.states[resume_step], type=RunState)
            self.trainer.policy_version = PolicyVersion(state.step)
        self.run = Run(spec, parts, state=state)

    @property
    def trained(self) -> list[str]:
        """Sample ids, in the order of training."""
        return [name for plan in self.trainer.trained for name in planned_samples(plan)]

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens that the student sampled for training."""
        return sum(plan.num_supervised for plan in self.trainer.trained)

    @property
    def lags(self) -> list[float]:
        """The greatest lag of each step."""
        return [float(v["lag_max"]) for kind, _, v in self.sink.records if kind == "step"]


@pytest.mark.parametrize("max_policy_lag", [0, 1, 3])
@pytest.mark.parametrize("step_turns", [1, 40])
def test_every_step_trains_a_full_batch_within_the_lag_bound(
    run: RunFixture, max_policy_lag: int, step_turns: int
) -> None:
    job = Job(make_spec(max_policy_lag=max_policy_lag), pause=loop_turns(step_turns))
    run(job.run.run())
    assert len(job.trained) == len(set(job.trained)) == 24
    assert max(job.lags) <= max_policy_lag
    assert job.run.ledger.num_held == 0
    assert job.queue.depth.num_samples == 0
    assert job.run.ledger.balance().num_missing_tokens == 0


def test_lag_is_used_when_the_trainer_is_slow(run: RunFixture) -> None:
    job = Job(make_spec(max_policy_lag=2), pause=loop_turns(100))
    run(job.run.run())
    assert max(job.lags) == 2


def test_every_version_is_published_once_in_order(run: RunFixture) -> None:
    job = Job(make_spec())
    run(job.run.run())
    assert job.publisher.versions == list(range(7))


def test_a_run_ends_when_its_data_ends_with_a_smaller_last_batch(run: RunFixture) -> None:
    job = Job(make_spec(num_steps=50), num_rows=5, num_epochs=2)
    run(job.run.run())
    assert [len(planned_samples(plan)) for plan in job.trainer.trained] == [4, 4, 2]


def test_a_run_ends_when_the_last_samples_die_while_a_batch_of_them_is_awaited(
    run: RunFixture,
) -> None:
    job = Job(make_spec(num_steps=5), num_rows=20, num_epochs=1, dead_ordinals=range(16, 20))
    run(job.run.run())
    assert len(set(job.trained)) == 16
    assert job.run.ledger.num_dead == 4


def test_a_run_whose_data_ends_without_a_step_fails(run: RunFixture) -> None:
    spec = make_spec(num_steps=1, samples_per_step=1)
    job = Job(spec, num_rows=1, num_epochs=1, dead_ordinals=range(1), held_out=2)
    with pytest.raises(JobFailed, match="the data ended before the first step: all 1 samples"):
        run(job.run.run())
    assert len(job.trainer.evaluated) == 1
    assert job.store.states == {}


def test_a_demand_withdrawn_between_two_batches_does_not_end_the_data(run: RunFixture) -> None:
    job = Job(make_spec(max_policy_lag=3), queue_class=DistantQueue)
    run(job.run.run())
    assert len(set(job.trained)) == 24


def test_a_dead_sample_is_replaced_and_buried(run: RunFixture) -> None:
    job = Job(make_spec(), dead_ordinals=range(3, 6))
    run(job.run.run())
    assert len(set(job.trained)) == 24
    assert [dead.ordinal for dead in job.store.dead_letters] == [3, 4, 5]
    assert job.run.ledger.num_dead == 3


def test_a_run_whose_samples_all_die_fails_with_the_last_reason(run: RunFixture) -> None:
    job = Job(make_spec(), dead_ordinals=range(1000))
    with pytest.raises(ExceptionGroup) as failure:
        run(job.run.run())
    assert failure.group_contains(JobFailed, match="dead letters; the last")


def test_a_trainer_failure_ends_the_run_and_leaves_no_task(run: RunFixture) -> None:
    job = Job(make_spec(), failing_steps=(3,))
    with pytest.raises(ExceptionGroup) as failure:
        run(job.run.run())
    assert failure.group_contains(TrainerError, match="step 3")


def test_skipped_steps_name_their_samples_and_three_in_a_row_end_the_run(run: RunFixture) -> None:
    job = Job(make_spec(), skipped_steps=(0, 2, 3, 4))
    with pytest.raises(ExceptionGroup) as failure:
        run(job.run.run())
    assert failure.group_contains(JobFailed, match="3 steps in a row; the samples .* sample-")
    events = [step for kind, step, _ in job.sink.records if kind == "event"]
    assert events == [1, 3, 4, 5]


def test_a_resumed_run_trains_exactly_what_was_not_trained(run: RunFixture) -> None:
    store, disk = MemoryStore(), dict[str, PolicyVersion]()
    spec = make_spec(max_policy_lag=1)
    first = Job(spec, failing_steps=(5,), store=store, disk=disk)
    with pytest.raises(ExceptionGroup):
        run(first.run.run())
    kept = [name for plan in first.trainer.trained[:4] for name in planned_samples(plan)]
    second = Job(spec, store=store, disk=disk, resume_step=4)
    run(second.run.run())
    assert [plan.step for plan in second.trainer.trained] == [4, 5]
    assert sorted(kept + second.trained) == sorted({*kept, *second.trained})
    assert {int(name.removeprefix("sample-")) for name in kept + second.trained} == set(range(24))


def test_the_divergence_is_measured_before_and_after(run: RunFixture) -> None:
    job = Job(make_spec(), held_out=5)
    run(job.run.run())
    evaluations = [(step, v) for kind, step, v in job.sink.records if kind == "evaluation"]
    assert [step for step, _ in evaluations] == [0, 6]
    assert [v["num_samples"] for _, v in evaluations] == [5, 5]


def test_a_held_out_row_that_is_no_prompt_costs_only_itself(run: RunFixture) -> None:
    job = Job(make_spec(), held_out=5, bad_held_out=range(1, 3))
    run(job.run.run())
    assert [len(planned_samples(plan)) for plan in job.trainer.evaluated] == [3, 3]


def test_held_out_data_without_a_prompt_fails_with_the_last_reason(run: RunFixture) -> None:
    job = Job(make_spec(), held_out=2, bad_held_out=range(2))
    with pytest.raises(ExceptionGroup) as failure:
        run(job.run.run())
    assert failure.group_contains(JobFailed, match="no held-out prompt .*: PromptError: prompt-1")


def test_data_that_ends_at_a_scheduled_evaluation_is_not_evaluated_twice(run: RunFixture) -> None:
    evaluation = EvaluationSection(every_steps=3)
    spec = msgspec.structs.replace(make_spec(num_steps=50), evaluation=evaluation)
    job = Job(spec, num_rows=12, num_epochs=1, held_out=2)
    run(job.run.run())
    assert [step for kind, step, _ in job.sink.records if kind == "evaluation"] == [0, 3]


def test_an_evaluation_larger_than_the_queue_does_not_wait_for_itself(run: RunFixture) -> None:
    job = Job(make_spec(), held_out=50, queue_samples=4)
    run(job.run.run())
    assert [len(planned_samples(plan)) for plan in job.trainer.evaluated] == [50, 50]


def test_a_resumed_run_does_not_measure_its_beginning_again(run: RunFixture) -> None:
    store, disk = MemoryStore(), dict[str, PolicyVersion]()
    first = Job(make_spec(), store=store, disk=disk, held_out=2)
    run(first.run.run())
    second = Job(make_spec(), store=store, disk=disk, held_out=2, resume_step=4)
    run(second.run.run())
    assert [step for kind, step, _ in second.sink.records if kind == "evaluation"] == [6]


def test_metrics_hold_the_ledger_and_its_balance(run: RunFixture) -> None:
    job = Job(make_spec())
    run(job.run.run())
    steps = [values for kind, _, values in job.sink.records if kind == "step"]
    [final] = [values for kind, _, values in job.sink.records if kind == "ledger"]
    assert final["tokens_generated"] == final["tokens_trained"] == job.num_sampled_tokens
    assert [values["trained"] for values in steps] == [4, 8, 12, 16, 20, 24]
    assert all(v["ledger_missing"] == 0 and v["ledger_missing_tokens"] == 0 for v in steps)
