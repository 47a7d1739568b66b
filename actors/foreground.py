# pyright: basic
"""A job in the foreground: this process starts it, shows it, and takes everything down with it."""

import asyncio
import functools
import importlib
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import uvloop

from opdkit.actors.checks.preflight import check_job
from opdkit.actors.cluster import cluster
from opdkit.actors.files.run_files import RunDirectory
from opdkit.actors.reports.progress import show_progress
from opdkit.actors.reports.run_report import RunSummary, Status, read_summary, write_report
from opdkit.actors.reports.run_totals import summarise
from opdkit.actors.run_messages import RunOutcome, Show, failed
from opdkit.actors.scratch import scratch_folders
from opdkit.protocols.config import JobSpec
from opdkit.protocols.errors import InfrastructureError
from opdkit.protocols.messages import ProgressRecord


def run(spec: JobSpec, *, show: Show | None = None) -> RunSummary:
    """Run a job to its end, from its newest checkpoint if there is one.

    Ctrl-C or SIGTERM stops it: everything is taken down, and the next call goes on from the
    checkpoint. A job that is complete stays as it is, until ``pipeline.num_steps`` is raised.
    A process can start one private cluster: for a second job, take another process, or set
    ``cluster.address``.

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
        if (summary := completed_before(spec, directory)) is not None:
            asyncio.run(_say_it_is_complete(summary, show))
            return summary
        failure = directory.path / "failure.txt"
        failure.unlink(missing_ok=True)
        outcome = _outcome(spec, directory, show)
        status: Status = "completed"
        if outcome.error:
            status = "failed"
            failure.write_text(outcome.traceback, encoding="utf-8")
        elif outcome.was_stopped:
            status = "cancelled"
        wall_s = time.monotonic() - started_s
        summary = summarise(spec, directory, status=status, cause=outcome.error, wall_s=wall_s)
        return write_report(directory, summary)


def completed_before(spec: JobSpec, directory: RunDirectory) -> RunSummary | None:
    """Return the summary of a run that has done all that the job asks for; None: it has not."""
    if directory.resumed is None or directory.resumed.step < spec.pipeline.num_steps:
        return None
    summary = read_summary(directory.summary) if directory.summary.exists() else None
    return summary if summary is not None and summary.status == "completed" else None


async def _say_it_is_complete(summary: RunSummary, show: Show) -> None:
    async def records() -> AsyncIterator[ProgressRecord]:
        yield ProgressRecord(
            phase="done",
            step=summary.num_steps,
            num_steps=summary.num_steps,
            message="complete before this call; raise pipeline.num_steps to go on",
        )

    await show(records())


def _outcome(spec: JobSpec, directory: RunDirectory, show: Show) -> RunOutcome:
    try:
        with (
            scratch_folders(directory.path) as scratch,
            own_sigterm_handler() as restore_handler,
            cluster(spec, session=scratch.session),
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            restore_handler()
            # Ray reads its environment when it is imported: not before the cluster's is set.
            driver: Any = importlib.import_module("opdkit.actors.driver")
            driving = driver.drive(spec, directory, scratch=scratch, show=show)
            return runner.run(_until_terminated(driving))
    except (KeyboardInterrupt, asyncio.CancelledError):
        return RunOutcome(was_stopped=True)
    except InfrastructureError as error:
        return failed(error)


@contextmanager
def own_sigterm_handler() -> Iterator[Callable[[], object]]:
    """Restore the caller's answer to SIGTERM, which Ray and the loop replace; also when called."""
    if threading.current_thread() is not threading.main_thread():  # where nobody replaces it
        yield lambda: None
        return
    own = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL
    restore = functools.partial(signal.signal, signal.SIGTERM, own)
    try:
        yield restore
    finally:
        restore()


async def _until_terminated(driving: Coroutine[Any, Any, RunOutcome]) -> RunOutcome:
    """Have SIGTERM cancel the run, as the runner has SIGINT do; Ray would exit at once."""
    task = asyncio.current_task()
    if task is not None and threading.current_thread() is threading.main_thread():
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await driving
