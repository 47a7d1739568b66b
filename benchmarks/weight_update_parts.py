# pyright: basic
"""The running part of ``weight_update``: imports Ray, so it is imported when a cluster is up."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import ray

from opdkit.actors.board_access import BoardAddress, WatchedBoard
from opdkit.actors.calls import call
from opdkit.actors.engines import ServeStudent
from opdkit.actors.megatron.settings import settings_from_job
from opdkit.actors.queue_actor import TRAINING, QueueActor, RemoteQueue
from opdkit.actors.serving import STUDENT, deploy, remove, student_part
from opdkit.actors.trainer_group import TrainerGroup
from opdkit.benchmarks.sampling_streams import SamplingStreams
from opdkit.protocols.config import JobSpec
from opdkit.protocols.ids import PolicyVersion
from opdkit.protocols.messages import WeightManifest

BOARD = "benchmark-board"
MAX_BOARD_CALLS = 1000
REPLY_FRACTION = 0.5
"""Replies may take this part of the student's length, so that updates fall into many of them."""


class Parts(NamedTuple):
    """What an update passes through."""

    trainer: TrainerGroup
    board: Any
    """The actor; Ray's handles have no static type."""
    student: ServeStudent
    publish_s: float
    """Deadline of a publication."""


async def measure_updates(
    spec: JobSpec, *, weights_directory: str, num_updates: int, num_streams: int
) -> tuple[list[Mapping[str, float]], Mapping[str, float]]:
    """Return the figures of every update, and the account of the streams beside them."""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    settings = settings_from_job(spec, export_dir=weights_directory)
    trainer = TrainerGroup(settings, payloads=_no_samples(spec), deadlines=spec.deadlines)
    async with _running(spec, trainer) as parts:
        manifest, _ = await _update(parts, PolicyVersion(0))
        buffers = [np.full(manifest.num_bytes, fill, np.uint8) for fill in (1, 2)]
        streams = SamplingStreams(
            parts.student,
            num_vocab=settings.num_vocab,
            max_tokens=int(REPLY_FRACTION * spec.student.max_model_len),
        )
        updates: list[Mapping[str, float]] = []
        async with streams.run(num_streams):
            for version in range(1, num_updates + 1):
                copy_s = await asyncio.to_thread(_copy, *buffers)
                _, figures = await _update(parts, PolicyVersion(version))
                updates.append(figures | {"copy_s": copy_s})
    return updates, streams.account()


@asynccontextmanager
async def _running(spec: JobSpec, trainer: TrainerGroup) -> AsyncIterator[Parts]:
    deadlines = spec.deadlines
    board_class: Any = ray.remote(WatchedBoard)
    board = board_class.options(name=BOARD, num_cpus=0, max_concurrency=MAX_BOARD_CALLS).remote()
    address = BoardAddress(actor_name=BOARD, namespace=spec.job.name, control_s=deadlines.control_s)
    part = student_part(spec.student, seed=spec.job.seed, board=address)
    try:
        async with asyncio.TaskGroup() as starting:
            starting.create_task(trainer.start(), name="start-trainer")
            deploying = starting.create_task(
                deploy(spec.job.name, [part], deadline_s=deadlines.startup_s), name="deploy"
            )
        handle = deploying.result()[STUDENT]
        student = ServeStudent(
            handle, generate_s=deadlines.generate_s, control_s=deadlines.control_s
        )
        yield Parts(trainer, board, student, deadlines.publish_s)
    finally:
        await trainer.shutdown()
        await remove(spec.job.name, [STUDENT])


def _no_samples(spec: JobSpec) -> RemoteQueue:
    """Return the queue that ranks must have to fetch batches from; here nothing is trained."""
    actor_class: Any = ray.remote(QueueActor)
    actor = actor_class.options(num_cpus=0).remote(max_samples=1, max_bytes=1)
    return RemoteQueue(actor, TRAINING, spec=spec)


async def _update(parts: Parts, version: PolicyVersion) -> tuple[WeightManifest, dict[str, float]]:
    began_s = perf_counter()
    manifest = await parts.trainer.export(version)
    exported_s = perf_counter()
    await call(
        lambda: parts.board.publish.remote(manifest),
        name=f"publish {version}",
        deadline_s=parts.publish_s,
    )
    published_s = perf_counter()
    stats = await parts.student.stats()
    return manifest, {
        "total_s": published_s - began_s,
        "export_s": exported_s - began_s,
        "publish_s": published_s - exported_s,
        "apply_s": max(replica.last_update_s for replica in stats),
        "weight_bytes": float(manifest.num_bytes),
    }


def _copy(source: Any, target: Any) -> float:
    began_s = perf_counter()
    np.copyto(target, source)
    return perf_counter() - began_s
