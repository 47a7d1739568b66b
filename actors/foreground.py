# pyright: basic
"""A job in the foreground: this process starts it, shows it, and takes everything down with it."""

import asyncio
import pathlib
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import msgspec
import ray
import uvloop

from opdkit.actors.calls import call
from opdkit.actors.cluster import cluster
from opdkit.actors.coordinator import Coordinator, Resumption, RunOutcome
from opdkit.actors.progress import Style, show_progress
from opdkit.actors.run_files import RunDirectory
from opdkit.actors.scratch import Scratch, scratch_folders
from opdkit.protocols.config import JobSpec
from opdkit.protocols.errors import JobFailed, OpdkitError
from opdkit.protocols.messages import ProgressRecord

STOP_S = 20.0
"""Time that a stopped run has to take its parts down."""
DAY_S = 86_400.0
NAME = "coordinator"


def run_job(spec: JobSpec, *, style: Style) -> RunDirectory:
    """Run a job to its end, from its newest checkpoint if there is one.

    Returns:
        The run's directory, for reports.

    Raises:
        ConfigError: the directory is in use or belongs to another job.
        JobFailed: with the cause in one line; its traceback is in ``failure.txt``.
        KeyboardInterrupt: after everything is taken down.
    """
    with (
        RunDirectory.open(spec) as directory,
        scratch_folders(directory.path) as scratch,
        cluster(spec, session=scratch.session),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        outcome = runner.run(_run(spec, directory, scratch, style))
    if outcome.error:
        (directory.path / "failure.txt").write_text(outcome.traceback, encoding="utf-8")
        raise JobFailed(outcome.error)
    return directory


async def _run(
    spec: JobSpec, directory: RunDirectory, scratch: Scratch, style: Style
) -> RunOutcome:
    coordinator: Any = (
        ray.remote(Coordinator)
        .options(name=NAME, num_cpus=0, max_concurrency=1000)
        .remote(
            msgspec.json.encode(spec),
            run_directory=str(directory.path.resolve()),
            weights_directory=scratch.weights,
        )
    )
    resumption = _resumption(directory)
    try:
        async with asyncio.TaskGroup() as group:
            running = group.create_task(
                call(
                    lambda: coordinator.run.remote(resumption), name="run", deadline_s=365 * DAY_S
                ),
                name="run",
            )
            await show_progress(_records(coordinator), style=style)
        return msgspec.msgpack.decode(running.result(), type=RunOutcome)
    except asyncio.CancelledError:
        await _stop(coordinator)
        raise


def _resumption(directory: RunDirectory) -> bytes | None:
    if directory.resumed is None:
        return None
    return msgspec.msgpack.encode(
        Resumption(
            state=directory.resumed.state,
            trainer_path=str(pathlib.Path(directory.resumed.trainer_path).resolve()),
        )
    )


async def _records(coordinator: Any) -> AsyncIterator[ProgressRecord]:
    num_seen = 0
    while True:
        reply = await call(
            lambda: coordinator.progress.remote(num_seen), name="progress", deadline_s=DAY_S
        )
        records = msgspec.msgpack.decode(reply, type=list[ProgressRecord])
        if not records:
            return
        num_seen += len(records)
        for record in records:
            yield record


async def _stop(coordinator: Any) -> None:
    """Have the run take its parts down; what does not answer in time dies with the cluster."""
    with suppress(OpdkitError):
        await call(lambda: coordinator.stop.remote(), name="stop", deadline_s=STOP_S)
