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
from opdkit.actors.weight_checksum import checksum_of
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
        if "slow" in sample_ids:
            await asyncio.Event().wait()
        return [self._payloads[name] for name in sample_ids]


@pytest.fixture(scope="module")
def run_real() -> Iterator[RunReal]:
    """Run coroutines on one loop beside a private Ray cluster."""
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


def test_group_trains_exports_and_goes_back_to_a_checkpoint(
    run_real: RunReal, tmp_path: Path
) -> None:

    model = write_model(tmp_path / "model", kind="llama", tied=True)
    plan = make_plan(samples_of_a_step(), data=2)

    async def scenario() -> None:
        group = await group_for(model, data=2).start()
        try:
            await group.prefetch(plan)
            first = await group.train(plan)
            await group.save(str(tmp_path / "checkpoint"))
            manifest = await group.export(PolicyVersion(1))
            async with asyncio.TaskGroup() as tasks:
                training = tasks.create_task(group.train(plan))
                tasks.create_task(group.prefetch(plan))
            second = training.result()
            evaluation = await group.evaluate(plan)
            await group.export(PolicyVersion(2))
            await group.export(PolicyVersion(3))
            await group.shutdown()
            await group.start()
            await group.load(str(tmp_path / "checkpoint"))
            again = await group.train(plan)
        finally:
            await group.shutdown()
        assert first.num_supervised == plan.num_supervised
        assert first.num_microbatches == len(plan.microbatches[0])
        assert 0.0 <= first.fetch_s < first.step_s
        assert second.loss < first.loss
        assert (again.loss, again.grad_norm) == (second.loss, second.grad_norm)
        assert evaluation.num_samples == 7
        assert 0.0 < evaluation.reverse_kl < second.loss
        assert manifest.policy_version == 1
        kept = sorted(path.name for path in (tmp_path / "export").iterdir())
        assert kept == ["policy-00000002.safetensors", "policy-00000003.safetensors"]

    run_real(scenario())


def test_manifest_proves_the_file(run_real: RunReal, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = write_model(tmp_path / "model", kind="llama", tied=True)

    async def scenario() -> None:
        group = await group_for(model, tensor=2).start()
        try:
            manifest = await group.export(PolicyVersion(0))
        finally:
            await group.shutdown()
        assert checksum_of(load_file(manifest.location).items()) == manifest.checksum
        assert os.path.getsize(manifest.location) == manifest.num_bytes

    run_real(scenario())


def test_rank_that_dies_in_a_step_is_named_and_the_group_can_start_again(
    run_real: RunReal, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model", kind="llama", tied=True)
    samples = samples_of_a_step()

    async def scenario() -> None:
        group = await group_for(model, data=2).start()
        try:
            victim = await group._ranks[1].__ray_call__.remote(lambda _: os.getpid())
            os.kill(victim, signal.SIGKILL)
            with pytest.raises(TrainerError, match="^trainer train: rank 1: died"):
                await group.train(make_plan(samples, data=2))
            await group.shutdown()
            await group.start()
            report = await group.train(make_plan(samples, data=2))
            assert not report.skipped
        finally:
            await group.shutdown()

    run_real(scenario())


def test_rank_that_does_not_answer_is_named(run_real: RunReal, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", kind="llama", tied=True)
    slow = [make_sample("slow", lengths=(5,), seed=0)]

    async def scenario() -> None:
        group = await group_for(model, DeadlineSection(step_s=0.5)).start()
        try:
            with pytest.raises(TrainerError, match="no answer from rank 0 within 0.5 s"):
                await group.prefetch(make_plan(slow))
        finally:
            await group.shutdown()

    run_real(scenario())


def test_mistakes_in_the_job_come_as_what_they_are(run_real: RunReal, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", kind="llama", tied=True)

    async def scenario() -> None:
        with pytest.raises(ConfigError, match=r"tensor is 4, but must divide .* key-value groups"):
            await group_for(model, tensor=4).start()
        with pytest.raises(StartupTimeout, match=r"1 ranks were not ready within 0.01 s"):
            await group_for(model, DeadlineSection(startup_s=0.01)).start()

    run_real(scenario())
