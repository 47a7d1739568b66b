# pyright: basic
"""The composition root: from a job to its running parts, and down again."""

import asyncio
import logging
import pathlib
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import ray

from opdkit.actors.board_access import BoardAddress
from opdkit.actors.metric_sinks import EverySink, JsonlSink, TensorBoardSink
from opdkit.actors.prompt_files import JsonlPrompts
from opdkit.actors.queue_actor import EVALUATION, TRAINING, QueueActor, RemoteQueue
from opdkit.actors.rollout_replica import ROLLOUTS, ServeRollouts, rollout_part
from opdkit.actors.run_files import RunDirectory
from opdkit.actors.serving import (
    STUDENT,
    TEACHER,
    deploy,
    remove,
    student_part,
    teacher_part,
)
from opdkit.actors.trainer_group import TrainerGroup
from opdkit.engine.clocks import MonotonicClock
from opdkit.engine.progress_feed import ProgressFeed
from opdkit.engine.run_parts import Parts
from opdkit.protocols.config import JobSpec
from opdkit.protocols.messages import ProgressRecord
from opdkit.protocols.roles import MetricSink, WeightPublisher

BYTES_PER_MIB = 1 << 20
TAKE_DOWN_S = 15.0

_log = logging.getLogger(__name__)


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
) -> AsyncIterator[Parts]:
    """Start every part of a job at once; take all down at the end of the block.

    Raises:
        StartupTimeout: a part was not ready by ``deadlines.startup_s``. The message names it.
    """
    await feed.show(
        ProgressRecord(
            phase="starting", step=resumed_step or 0, num_steps=spec.pipeline.num_steps
        )
    )
    async with AsyncExitStack() as stack:
        queue_actor = _queue_actor(spec)
        stack.callback(ray.kill, queue_actor)
        trainer = TrainerGroup(spec, queue=_queue(queue_actor, TRAINING, spec), ...)
        yield Parts()
