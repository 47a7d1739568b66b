# pyright: basic
"""Trainer ranks as Ray actors: a step, a checkpoint, a death, and errors by their names."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import ray
import uvloop

from opdkit.actors.trainer_group import TrainerGroup
from opdkit.protocols.config import DeadlineSection
from opdkit.protocols.errors import ConfigError, StartupTimeout, TrainerError
from opdkit.protocols.ids import PolicyVersion
from opdkit.protocols.messages import Sample
from tests.actors.megatron.micro import (
    by_id,
    make_plan,
    make_sample,
    settings_for,
    write_model,
)

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

RunReal = Callable[[Coroutine[Any, Any, Any]], Any]


class Payloads:
    """Hands out payloads; a sample of the id ``slow`` never comes."""

    def __init__(self, samples: dict[str, Sample]) -> None:
        self._payloads = {name: msgspec.msgpack.encode(sample) for name, sample in samples.items()}

    async def fetch(self, sample_ids: Sequence[str]) -> list[bytes]:
        """Return them in the order asked."""
        if "slow" in sample_ids:
            await asyncio.Event().wait()
        return [self._payloads[name] for name in sample_ids]


@pytest.fixture(scope="module")
def run_real() -> Iterator[RunReal]:
    """Run coroutines on one loop beside a private Ray cluster: the session's, or one of our own."""
    is_ours = not ray.is_initialized()
    if is_ours:
        ray.init(
            address="local",
            num_cpus=4,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}},
        )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        yield runner.run
    if is_ours:
        ray.shutdown()


def samples_of_a_step() -> list[Sample]:
    return [make_sample(f"s{n}", lengths=(4 + 3 * n,), seed=n) for n in range(7)]


def group_for(
    model: Path, deadlines: DeadlineSection | None = None, **changes: Any
) -> TrainerGroup:
    payloads = Payloads(by_id([*samples_of_a_step(), make_sample("slow", lengths=(5,), seed=0)]))
    return TrainerGroup(
        settings_for(model, **changes),
        payloads=payloads,
        deadlines=deadlines or DeadlineSection(),
    )


def test_group_trains_loses_a_rank_and_goes_on_from_its_checkpoint(
    run_real: RunReal, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model", kind="llama", tied=True)
    checkpoint = str(tmp_path / "checkpoint")
    plan = make_plan(samples_of_a_step(), data=2)

    async def scenario() -> None:
        group = await group_for(model, data=2).start()
        try:
            await group.prefetch(plan)
            first = await group.train(plan)
            await group.save(checkpoint)
            for version in (1, 2, 3):
                manifest = await group.export(PolicyVersion(version))
                assert manifest.policy_version == version
            async with asyncio.TaskGroup() as tasks:
                training = tasks.create_task(group.train(plan))
                tasks.create_task(group.prefetch(plan))
            second = training.result()
            evaluation = await group.evaluate(plan)

            victim = await group._ranks[1].__ray_call__.remote(lambda _: os.getpid())
            os.kill(victim, signal.SIGKILL)
            with pytest.raises(TrainerError, match=r"^trainer train: rank 1: died"):
                await group.train(plan)
            await group.shutdown()
            await group.start()
            await group.load(checkpoint)
            again = await group.train(plan)
        finally:
            await group.shutdown()
        assert first.num_supervised == plan.num_supervised
        assert first.num_microbatches == len(plan.microbatches[0])
        assert second.loss < first.loss
        assert (again.loss, again.grad_norm) == (second.loss, second.grad_norm)
        assert evaluation.num_samples == 7
        assert 0.0 < evaluation.reverse_kl_on_support < second.loss

    run_real(scenario())
    kept = sorted(path.name for path in (tmp_path / "export").iterdir())
    assert kept == ["policy-00000002.safetensors", "policy-00000003.safetensors"]


def test_rank_that_does_not_answer_is_named(run_real: RunReal, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", kind="llama", tied=True)
    slow = [make_sample("slow", lengths=(5,), seed=0)]

    async def scenario() -> None:
        group = await group_for(model, DeadlineSection(step_s=0.5)).start()
        try:
            with pytest.raises(TrainerError, match=r"no answer from rank 0 within 0\.5 s"):
                await group.prefetch(make_plan(slow))
        finally:
            await group.shutdown()

    run_real(scenario())


def test_mistakes_in_the_job_come_as_what_they_are(run_real: RunReal, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", kind="llama", tied=True)

    async def scenario() -> None:
        with pytest.raises(ConfigError, match=r"num_vocab is 94, but the student has 93"):
            await group_for(model, num_vocab=94).start()
        with pytest.raises(StartupTimeout, match=r"1 ranks were not ready within 0\.01 s"):
            await group_for(model, DeadlineSection(startup_s=0.01)).start()

    run_real(scenario())
