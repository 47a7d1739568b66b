# pyright: basic
"""A job in the foreground: this process starts it, shows it, and takes everything down with it."""

import asyncio
import functools
import importlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import uvloop

from opdkit.actors.cluster import cluster
from opdkit.actors.preflight import check_job
from opdkit.actors.progress import show_progress
from opdkit.actors.run_files import RunDirectory
from opdkit.actors.run_messages import RunOutcome
from opdkit.actors.run_report import RunSummary, Status, write_report
from opdkit.actors.run_totals import summarise
from opdkit.actors.scratch import scratch_folders
from opdkit.protocols.config import JobSpec
from opdkit.protocols.messages import ProgressRecord

Show = Callable[[AsyncIterator[ProgressRecord]], Awaitable[None]]


def run(spec: JobSpec, *, show: Show | None = None) -> RunSummary:
    """Run a job to its end, from its newest checkpoint if there is one.

    Ctrl-C stops it: everything is taken down, and the next call goes on from the checkpoint.

    Args:
        spec: The job, checked.
        show: Shows progress records until there are no more; None: a line a step on stdout.

    Raises:
        ConfigError: the job cannot run as described, or its directory is in use.
    """
    check_job(spec).require()
    show = show or functools.partial(show_progress, style="lines")
    started_s = time.monotonic()
    with RunDirectory.open(spec) as directory:
        outcome = _outcome(spec, directory, show)
        status: Status = "completed"
        if outcome.error:
            status = "failed"
            (directory.path / "failure.txt").write_text(outcome.traceback, encoding="utf-8")
        elif outcome.was_stopped:
            status = "cancelled"
        wall_s = time.monotonic() - started_s
        summary = summarise(spec, directory, status=status, cause=outcome.error, wall_s=wall_s)
        return write_report(directory, summary)


def _outcome(spec: JobSpec, directory: RunDirectory, show: Show) -> RunOutcome:
    try:
        with (
            scratch_folders(directory.path) as scratch,
            cluster(spec, session=scratch.session),
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            # Ray reads its environment when it is imported: not before the cluster's is set.
            driver: Any = importlib.import_module("opdkit.actors.driver")
            outcome: RunOutcome = runner.run(
                driver.drive(spec, directory, scratch=scratch, show=show)
            )
            return outcome
    except KeyboardInterrupt:
        return RunOutcome(was_stopped=True)
