# pyright: basic
"""The foreground's part in the cluster: it starts the coordinator, watches it, and stops it."""

import asyncio
import functools
import pathlib
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import msgspec
import ray

from opdkit.actors.calls import call
from opdkit.actors.coordinator import Coordinator
from opdkit.actors.files.run_files import RunDirectory
from opdkit.actors.run_messages import Resumption, RunOutcome, Show
from opdkit.actors.scratch import Scratch
from opdkit.engine.one_error import one_error
from opdkit.protocols.config import JobSpec
from opdkit.protocols.errors import OpdkitError
from opdkit.protocols.messages import ProgressRecord

NAME = "coordinator"
STOP_S = 20.0
"""Time that a stopped run has to take its parts down."""
YEAR_S = 365 * 86_400.0


async def drive(
    spec: JobSpec, directory: RunDirectory, *, scratch: Scratch, show: Show
) -> RunOutcome:
    """Run the job on the cluster that this process is connected to. Cancelling stops the run.

    Raises:
        InfrastructureError: the coordinator died, or did not answer.
    """
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
        with one_error():
            async with asyncio.TaskGroup() as group:
                running = group.create_task(call(send, name=NAME, deadline_s=YEAR_S), name="run")
                await show(_records(coordinator))
        return msgspec.msgpack.decode(running.result(), type=RunOutcome)
    except BaseException:
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
        reply = await call(send, name=f"{NAME}.progress", deadline_s=YEAR_S)
        records = msgspec.msgpack.decode(reply, type=list[ProgressRecord])
        if not records:
            return
        num_seen += len(records)
        for record in records:
            yield record


async def _stop(coordinator: Any) -> None:
    """Have the run take its parts down; what does not answer in time dies with the cluster."""
    with suppress(OpdkitError):
        await call(lambda: coordinator.stop.remote(), name=f"{NAME}.stop", deadline_s=STOP_S)
