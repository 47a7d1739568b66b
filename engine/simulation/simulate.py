"""A whole job in virtual time: the engine itself, on simulated parts.

Ten thousand samples take seconds, and the same job gives the same figures on any machine.
"""

import asyncio
from collections import Counter
from statistics import fmean
from typing import Any

import msgspec

from opdkit.engine.one_error import one_error
from opdkit.engine.progress_feed import ProgressFeed
from opdkit.engine.reply import derive_seed
from opdkit.engine.rollouts import Rollouts
from opdkit.engine.run import Run
from opdkit.engine.run_parts import Parts
from opdkit.engine.sample_queue import LeaseQueue
from opdkit.engine.scheduling import make_scheduler
from opdkit.engine.simulation.bounds import Bounds, bounds, settled_steps
from opdkit.engine.simulation.parts import (
    SimulatedStudent,
    SimulatedTeacher,
    SimulatedTemplate,
    SimulatedTrainer,
    reply_tokens,
)
from opdkit.engine.stage_report import Stage, time_by_stage
from opdkit.engine.tasks import make_task
from opdkit.engine.testing import LoopClock, VirtualTimeLoop
from opdkit.engine.testing_run import ListPrompts, ListSink, MemoryStore
from opdkit.protocols.config import JobSpec
from opdkit.protocols.errors import ConfigError
from opdkit.protocols.ids import Ordinal
from opdkit.protocols.messages import Message

BYTES_PER_MIB = 1 << 20
SCHEDULER = "single_turn"
MIN_STEPS = 4


class SimulationReport(Message, frozen=True, kw_only=True):
    """What came of a simulated job. Rates are of virtual time, over ``settled_steps``."""

    samples_per_s: float
    bounds: Bounds
    lags: dict[int, int]
    """Number of steps by the largest lag of their samples."""
    mean_lag: float
    shares: dict[Stage, float]
    """Of the run loop's time: computing in a stage, or standing still for it."""
    length_ratio: float
    """Mean length of the replies trained on over that of the replies drawn: 1, or a bias."""
    num_steps: int
    num_trained: int
    num_dead: int
    virtual_s: float

    @property
    def reached(self) -> float:
        """Samples per second, as a share of the bound."""
        return self.samples_per_s / self.bounds.together

    @property
    def bounding_stage(self) -> Stage:
        """The stage with the largest share."""
        return max(self.shares, key=lambda stage: self.shares[stage])


def simulate(spec: JobSpec) -> SimulationReport:
    """Run a job without its models, data and cluster; see ``SimulationSection`` for its speeds.

    Raises:
        ConfigError: the simulated prompt leaves no room for a reply, there are too few steps to
            tell a rate, or the scheduler takes more than one turn.
        JobFailed: as a run does.
    """
    _check(spec)
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        sink, virtual_s = runner.run(_run(spec))
    records = [values for kind, _, values in sink.records if kind == "step"]
    return _report(spec, records, virtual_s=virtual_s)


def _check(spec: JobSpec) -> None:
    if spec.simulation.prompt_tokens >= spec.student.max_model_len:
        raise ConfigError(
            f"simulation.prompt_tokens is {spec.simulation.prompt_tokens}, but must be less than "
            f"student.max_model_len, {spec.student.max_model_len}: a reply needs room too"
        )
    if spec.rollout.scheduler != SCHEDULER:
        raise ConfigError(
            f"rollout.scheduler is {spec.rollout.scheduler!r}, but a simulation knows only "
            f"{SCHEDULER!r}"
        )
    least = MIN_STEPS * (spec.pipeline.max_policy_lag + 1)
    if spec.pipeline.num_steps < least:
        raise ConfigError(
            f"pipeline.num_steps is {spec.pipeline.num_steps}, but must be at least {MIN_STEPS} "
            f"times pipeline.max_policy_lag + 1, {least}: a pipeline fills and empties"
        )


async def _run(spec: JobSpec) -> tuple[ListSink, float]:
    clock = LoopClock()
    queue = LeaseQueue(
        max_samples=spec.pipeline.queue_samples or spec.pipeline.slots,
        max_bytes=spec.pipeline.queue_mib * BYTES_PER_MIB,
        clock=clock,
    )
    student = SimulatedStudent(spec)
    sink = ListSink()
    parts = Parts(
        prompts=_prompts(spec),
        held_out=None,
        runner=Rollouts(
            student=student,
            teacher=SimulatedTeacher(spec),
            template=SimulatedTemplate(prompt_tokens=spec.simulation.prompt_tokens),
            train_queue=queue,
            evaluation_queue=queue,
            scheduler=make_scheduler(spec.rollout.scheduler, spec.rollout.scheduler_options),
            settings=spec.rollout,
            max_model_len=spec.student.max_model_len,
            clock=clock,
        ),
        queue=queue,
        evaluation_queue=queue,
        trainer=SimulatedTrainer(spec, queue=queue),
        publisher=student,
        store=MemoryStore(),
        sink=sink,
        feed=ProgressFeed(),
        clock=clock,
    )
    with one_error():
        await Run(spec, parts).run()
    return sink, clock.now()


def _prompts(spec: JobSpec) -> ListPrompts:
    return ListPrompts(spec.pipeline.num_steps * spec.pipeline.samples_per_step)


def _report(spec: JobSpec, records: list[dict[str, Any]], *, virtual_s: float) -> SimulationReport:
    first, behind = settled_steps(spec)
    settled = records[first:behind]
    times_s = [time_by_stage(record) for record in settled]
    total_s = sum(sum(one.values()) for one in times_s)
    replies = drawn_replies(spec)
    num_trained = sum(record["num_samples"] for record in records)
    mean_trained = sum(record["num_supervised"] for record in records) / num_trained
    return SimulationReport(
        samples_per_s=sum(record["num_samples"] for record in settled) / total_s,
        bounds=bounds(spec, replies),
        lags=dict(sorted(Counter(record["lag_max"] for record in records).items())),
        mean_lag=fmean(record["lag_mean"] for record in records),
        shares={stage: sum(one[stage] for one in times_s) / total_s for stage in Stage},
        length_ratio=mean_trained / fmean(replies),
        num_steps=len(records),
        num_trained=num_trained,
        num_dead=records[-1]["dead"],
        virtual_s=virtual_s,
    )


def drawn_replies(spec: JobSpec) -> list[int]:
    """Return the lengths of all replies, in tokens, in the order of their draw."""
    room = spec.student.max_model_len - spec.simulation.prompt_tokens
    max_tokens = min(spec.rollout.max_new_tokens, room)
    prompts = _prompts(spec)
    tasks = (
        make_task(prompts, Ordinal(n), due_step=0, seed=spec.job.seed) for n in range(len(prompts))
    )
    return [
        # Of its first request.
        reply_tokens(spec.simulation, seed=derive_seed(task.seed, 0, 1, 0), max_tokens=max_tokens)
        for task in tasks
    ]


def with_one_more(spec: JobSpec, stage: Stage) -> JobSpec:
    """Return the job with one more student or teacher replica, or data-parallel rank."""
    replace = msgspec.structs.replace
    if stage is Stage.STUDENT:
        return replace(spec, student=replace(spec.student, replicas=spec.student.replicas + 1))
    if stage is Stage.TEACHER:
        first, *others = spec.teachers
        more = replace(first, replicas=first.replicas + 1)
        return replace(spec, teachers=(more, *others))
    assert stage is Stage.TRAINER, f"{stage} has no replicas"
    parallel = spec.trainer.parallel
    parallel = replace(parallel, data=parallel.data + 1)
    return replace(spec, trainer=replace(spec.trainer, parallel=parallel))
