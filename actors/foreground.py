# pyright: basic
"""A job in the foreground: this process starts it, shows it, and takes everything down with it."""

import asyncio
import functools
import pathlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec
import ray
import uvloop

from opdkit.actors.calls import call
from opdkit.actors.cluster import cluster
from opdkit.actors.coordinator import Coordinator, Resumption, RunOutcome
from opdkit.actors.divergence_plot import plot_divergence
from opdkit.actors.metric_sinks import read_metrics
from opdkit.actors.run_files import RunDirectory
from opdkit.actors.run_report import RunSummary, Status, write_summary
from opdkit.actors.run_totals import summarise
from opdkit.actors.scratch import Scratch, scratch_folders
from opdkit.protocols.config import JobSpec
from opdkit.protocols.errors import OpdkitError
from opdkit.protocols.messages import ProgressRecord

STOP_S = 20.0
"""Time that a stopped run has to take its parts down."""
YEAR_S = 365 * 86_400.0
NAME = "coordinator"

Show = Callable[[AsyncIterator[ProgressRecord]], Awaitable[None]]


def run_job(spec: JobSpec, *, show: Show) -> RunSummary:
    """Run a job to its end, from its newest checkpoint if there is one.

    Ctrl-C stops it: everything is taken down, and the next call goes on from the checkpoint.

    Args:
        spec: The job, checked.
        show: Shows progress records until there are no more.

    Raises:
        ConfigError: the directory is in use or belongs to another job.
    """
    started_s = time.monotonic()
    with RunDirectory.open(spec) as directory:
        outcome = _outcome(spec, directory, show)
        status: Status = "completed"
        if outcome.error:
            status = "failed"
            (directory.path / "failure.txt").write_text(outcome.traceback, encoding="utf-8")
        elif outcome.was_stopped:
            status = "cancelled"
        if directory.metrics.exists():
            plot_divergence(directory.plot, read_metrics(directory.metrics), title=spec.job.name)
        wall_s = time.monotonic() - started_s
        summary = summarise(spec, directory, status=status, cause=outcome.error, wall_s=wall_s)
        write_summary(directory.summary, summary)
        return summary


def _outcome(spec: JobSpec, directory: RunDirectory, show: Show) -> RunOutcome:
    try:
        with (
            scratch_folders(directory.path) as scratch,
            cluster(spec, session=scratch.session),
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            return runner.run(_run(spec, directory, scratch, show))
    except KeyboardInterrupt:
        return RunOutcome(was_stopped=True)


async def _run(spec: JobSpec, directory: RunDirectory, scratch: Scratch, show: Show) -> RunOutcome:
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
    send = functools.partial(coordinator.run.remote, resumption)
    try:
        async with asyncio.TaskGroup() as group:
            running = group.create_task(call(send, name="run", deadline_s=YEAR_S), name="run")
            await show(_records(coordinator))
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
        send = functools.partial(coordinator.progress.remote, num_seen)
        reply = await call(send, name="progress", deadline_s=YEAR_S)
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
