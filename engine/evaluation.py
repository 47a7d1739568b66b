"""Divergence on held-out prompts, by the same path as training: sampled, scored, queued, packed."""

import asyncio
from statistics import fmean

import msgspec

from opdkit.engine.packing import plan_step
from opdkit.engine.tasks import dead_prompt, make_task
from opdkit.protocols.config import JobSpec
from opdkit.protocols.errors import JobFailed, PromptError
from opdkit.protocols.ids import Ordinal
from opdkit.protocols.messages import (
    DeadSample,
    Demand,
    EvaluationReport,
    RolloutOutcome,
    RolloutTask,
    SampleMeta,
)
from opdkit.protocols.roles import PolicyTrainer, PromptSource, RolloutRunner, SampleQueue


async def evaluate(
    spec: JobSpec,
    *,
    prompts: PromptSource,
    runner: RolloutRunner,
    queue: SampleQueue,
    trainer: PolicyTrainer,
    step: int,
) -> EvaluationReport:
    """Measure the divergence of the weights that the replicas serve now.

    Seeds do not depend on ``step``: two evaluations differ by the weights only.

    Raises:
        JobFailed: no held-out prompt gave a sample.
    """
    samples = await _sample(spec, prompts=prompts, runner=runner, queue=queue, step=step)
    plan = plan_step(
        samples,
        step=step,
        data_parallel_size=spec.trainer.parallel.data,
        microbatch_tokens=spec.trainer.microbatch_tokens,
    )
    await trainer.prefetch(plan)
    report = await trainer.evaluate(plan)
    await queue.acknowledge([sample.sample_id for sample in samples])
    return msgspec.structs.replace(
        report,
        num_samples=len(samples),
        mean_generated_tokens=fmean(sample.num_generated_tokens for sample in samples),
        truncated_fraction=fmean(sample.finish_reason == "length" for sample in samples),
    )


async def _sample(
    spec: JobSpec, *, prompts: PromptSource, runner: RolloutRunner, queue: SampleQueue, step: int
) -> list[SampleMeta]:
    """Run all rollouts and lease what they give.

    The lease waits from the beginning: what it waits for is admitted even to a full queue.
    """
    num_prompts = min(len(prompts), spec.evaluation.max_prompts)
    dead: list[DeadSample] = []

    async def roll(index: int) -> None:
        try:
            task = _task(spec, prompts, index, step=step)
        except PromptError as error:
            outcome: RolloutOutcome = dead_prompt(Ordinal(index), error)
        else:
            outcome = await runner.run(task)
        if isinstance(outcome, DeadSample):
            dead.append(outcome)
            if len(dead) == num_prompts:
                raise JobFailed(
                    f"evaluation at step {step}: no held-out prompt gave a sample; "
                    f"the last: {outcome.reason}: {outcome.message}"
                )
            await queue.set_demand(Demand(count=num_prompts - len(dead)))

    await queue.set_demand(Demand(count=num_prompts))
    async with asyncio.TaskGroup() as tasks:
        leasing = tasks.create_task(queue.lease(), name=f"held-out-{step}-lease")
        for index in range(num_prompts):
            tasks.create_task(roll(index), name=f"held-out-{step}-{index}")
    return leasing.result()


def _task(spec: JobSpec, prompts: PromptSource, index: int, *, step: int) -> RolloutTask:
    task = make_task(
        prompts,
        Ordinal(index),
        due_step=step,
        seed=spec.job.seed,
        name=f"held-out-{step}",
        held_out=True,
    )
    # Not of the ledger: only an order, and never one that was acknowledged before.
    ordinal = Ordinal(step * spec.evaluation.max_prompts + index)
    return msgspec.structs.replace(task, ordinal=ordinal)
