# pyright: basic
"""The composition root: from a job to its running parts, and down again."""

import asyncio
import functools
import logging
import pathlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import ray

from opdkit.actors.board_access import BoardAddress
from opdkit.actors.files.metric_sinks import open_sinks
from opdkit.actors.files.prompt_files import JsonlPrompts
from opdkit.actors.files.run_files import RunDirectory
from opdkit.actors.megatron.settings import settings_from_job
from opdkit.actors.queue_actor import EVALUATION, TRAINING, QueueActor, RemoteQueue
from opdkit.actors.rollout_replica import ROLLOUTS, ServeRollouts, rollout_part
from opdkit.actors.serving import STUDENT, TEACHER, deploy, remove, student_part, teacher_part
from opdkit.actors.trainer_group import TrainerGroup
from opdkit.engine.clocks import MonotonicClock
from opdkit.engine.progress_feed import ProgressFeed
from opdkit.engine.run_parts import Parts
from opdkit.protocols.config import JobSpec
from opdkit.protocols.messages import ProgressRecord
from opdkit.protocols.roles import WeightPublisher

BYTES_PER_MIB = 1 << 20
TAKE_DOWN_S = 15.0
"""Longest wait for one part to go; what is left dies with the cluster."""

MAX_QUEUE_CALLS = 1 << 14
"""Calls that the queue's actor holds at once; each held put is one."""

ROLES = (STUDENT, TEACHER, ROLLOUTS)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Launched:
    """A job's parts, running."""

    parts: Parts
    trainer: TrainerGroup


@asynccontextmanager
async def launch(
    spec: JobSpec,
    *,
    run_directory: pathlib.Path,
    weights_directory: str,
    board: BoardAddress,
    publisher: WeightPublisher,
    feed: ProgressFeed,
    resumed_step: int | None,
) -> AsyncIterator[Launched]:
    """Start every part of a job at once; take all down at the end of the block.

    Raises:
        StartupTimeout: a part was not ready by ``deadlines.startup_s``. The message names it.
    """
    num_steps = spec.pipeline.num_steps
    await feed.show(
        ProgressRecord(
            phase="starting",
            step=resumed_step or 0,
            num_steps=num_steps,
            message="student, teacher, rollout workers and trainer: a minute on an idle machine",
        )
    )
    queue_actor = _start_queue(spec)
    training = RemoteQueue(queue_actor, TRAINING, spec=spec)
    settings = settings_from_job(spec, export_dir=weights_directory)
    trainer = TrainerGroup(settings, payloads=training, deadlines=spec.deadlines)
    parts = [
        student_part(spec.student, seed=spec.job.seed, board=board),
        teacher_part(spec.teachers[0], loss=spec.loss, vocab_size=settings.num_vocab),
        rollout_part(spec, queue_actor=queue_actor),
    ]
    directory = RunDirectory(run_directory, keep=spec.checkpoint.keep)
    async with AsyncExitStack() as stack:
        stack.callback(ray.kill, queue_actor)
        stack.push_async_callback(_take_down, "trainer", trainer.shutdown)
        stack.push_async_callback(
            _take_down, "deployments", functools.partial(remove, spec.job.name, ROLES)
        )
        async with asyncio.TaskGroup() as starting:
            starting.create_task(trainer.start(), name="start-trainer")
            deploying = starting.create_task(
                deploy(spec.job.name, parts, deadline_s=spec.deadlines.startup_s), name="deploy"
            )
        handles = deploying.result()
        yield Launched(
            trainer=trainer,
            parts=Parts(
                prompts=_prompts(spec),
                held_out=_held_out(spec),
                runner=ServeRollouts(handles[ROLLOUTS], spec=spec),
                queue=training,
                evaluation_queue=RemoteQueue(queue_actor, EVALUATION, spec=spec),
                trainer=trainer,
                publisher=publisher,
                store=directory,
                sink=stack.enter_context(
                    open_sinks(
                        directory,
                        tensorboard=spec.logging.tensorboard,
                        resumed_step=resumed_step,
                    )
                ),
                feed=feed,
                clock=MonotonicClock(),
            ),
        )


async def _take_down(name: str, stop: Callable[[], Awaitable[object]]) -> None:
    try:
        async with asyncio.timeout(TAKE_DOWN_S):
            await stop()
    except TimeoutError:
        _log.warning("%s did not stop within %g s", name, TAKE_DOWN_S)


def _start_queue(spec: JobSpec) -> Any:
    pipeline = spec.pipeline
    return (
        ray.remote(QueueActor)
        .options(num_cpus=0, max_concurrency=MAX_QUEUE_CALLS)
        .remote(
            max_samples=pipeline.queue_samples or pipeline.slots,
            max_bytes=pipeline.queue_mib * BYTES_PER_MIB,
        )
    )


def _prompts(spec: JobSpec) -> JsonlPrompts:
    data = spec.data
    return JsonlPrompts(
        data.train,
        seed=spec.job.seed,
        shuffle=data.shuffle,
        samples_per_prompt=data.samples_per_prompt,
        num_epochs=data.num_epochs,
    )


def _held_out(spec: JobSpec) -> JsonlPrompts | None:
    return JsonlPrompts(spec.data.held_out, shuffle=False) if spec.data.held_out else None
