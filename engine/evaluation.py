"""Divergence on held-out prompts, by the same path as training: sampled, scored, queued, packed."""

import asyncio

import msgspec

from opdkit.engine.packing import plan_step
from opdkit.engine.tasks import make_task
from opdkit.protocols.config import JobSpec
from opdkit.protocols.errors import JobFailed
from opdkit.protocols.ids import Ordinal
from opdkit.protocols.messages import (
    DeadSample,
    Demand,
    EvaluationReport,
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
    count = min(len(prompts), spec.evaluation.max_prompts)
    async with asyncio.TaskGroup() as rollouts:
        running = [
            rollouts.create_task(
                runner.run(_task(spec, prompts, index, step=step)), name=f"held-out-{step}-{index}"
            )
            for index in range(count)
        ]
    outcomes = [task.result() for task in running]
    samples = [outcome for outcome in outcomes if isinstance(outcome, SampleMeta)]
    if not samples:
        reasons = {outcome.message for outcome in outcomes if isinstance(outcome, DeadSample)}
        raise JobFailed(f"evaluation at step {step}: no held-out prompt gave a sample: {reasons}")
    await queue.set_demand(Demand(count=len(samples)))
    leased = await queue.lease()
    plan = plan_step(
        leased,
        step=step,
        data_parallel_size=spec.trainer.parallel.data,
        microbatch_tokens=spec.trainer.microbatch_tokens,
    )
    await trainer.prefetch(plan)
    report = await trainer.evaluate(plan)
    await queue.acknowledge([sample.sample_id for sample in leased])
    return report


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
