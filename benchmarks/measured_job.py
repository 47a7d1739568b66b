# pyright: basic
"""One run of a job in processes of its own, with the CPU time of each stage over a window of steps.

The window opens and closes when the run reports a step, which is when this module reads the CPU
clocks of the run's processes. Warm-up lies before it, and behind it the steps in which no prompts
are left to draw, so that within it all stages have their usual work.
"""

import os
import pathlib
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any, NamedTuple

import msgspec
import psutil  # type: ignore[import-untyped]  # publishes no types

from opdkit.actors.files.metric_sinks import read_metrics
from opdkit.engine.stage_report import Stage, time_by_stage
from opdkit.protocols.errors import JobFailed

TITLES = {
    "-student:student": "student",
    "-teacher:teacher": "teacher",
    "-rollouts:rollouts": "rollouts",
    "ray::TrainerRank": "trainer",
}
"""What is in the title of a process: whose CPU time it is, and that of the processes it started."""

CONTROL = "control"
"""Whose CPU time the rest is: Ray, the coordinator, the queue, the command itself."""

ROLES = (*TITLES.values(), CONTROL)
BUSY_STAGES = ("student", "teacher", "trainer")
LEAVE_S = 60.0
"""What an interrupted run may take to end before it is killed."""


class Window(NamedTuple):
    """Steps that are measured: those behind ``first``, up to ``last``."""

    first: int
    last: int


class Reading(NamedTuple):
    """Clocks at one moment, in seconds."""

    wall_s: float
    cpu_s: Mapping[str, float]
    """By role; of all processes that lived then."""


def run_job(
    config: str, *, directory: pathlib.Path, overrides: Sequence[str], window: Window
) -> dict[str, float]:
    """Run a job to its end and return its figures over the window.

    Args:
        config: its YAML file.
        directory: its run directory, an existing one.
        overrides: as on the command line; they set ``job.run_dir`` to the directory.
        window: which steps count.

    Raises:
        JobFailed: the run did, or ended before the window. The message has its last words.
    """
    with _command(config, overrides, errors=directory / "stderr.txt") as process:
        readings = dict(_read_at(process, window))
        code = process.wait()
    if code or len(readings) < len(window):
        words = (directory / "stderr.txt").read_text(encoding="utf-8").strip()[-2000:]
        raise JobFailed(
            f"the measured run ended with {code} after {len(readings)} readings: {words}"
        )
    steps = [
        record
        for record in read_metrics(directory / "metrics.jsonl")
        if record["kind"] == "step" and window.first < record["step"] <= window.last
    ]
    return window_figures(steps, readings[window.first], readings[window.last])


def window_figures(
    steps: Sequence[Mapping[str, Any]], before: Reading, after: Reading
) -> dict[str, float]:
    """Return rates, CPU time and shares of time over steps.

    Args:
        steps: metrics of the steps, in order.
        before: at the end of the step before them.
        after: at the end of the last one.
    """
    num_samples = sum(step["num_samples"] for step in steps)
    wall_s = after.wall_s - before.wall_s
    cpu_s = {role: (after.cpu_s[role] - before.cpu_s[role]) / num_samples for role in ROLES}
    return {
        "samples_per_s": num_samples / wall_s,
        "tokens_per_sample": statistics.fmean(step["generated_tokens_mean"] for step in steps),
        "lag_max": max(step["lag_max"] for step in steps),
        "missing_samples": steps[-1]["ledger_missing"],
        "cpu_s_per_sample": sum(cpu_s.values()),
        **{f"{role}_cpu_s_per_sample": value for role, value in cpu_s.items()},
        **{f"{stage}_busy_fraction": _busy(steps, stage) for stage in BUSY_STAGES},
        **{f"{stage}_bound_fraction": share for stage, share in bound_shares(steps).items()},
    }


def bound_shares(steps: Sequence[Mapping[str, Any]]) -> dict[Stage, float]:
    """Return the share of the run loop's time that each stage computed or was waited for.

    The stage with the largest bounds the run.
    """
    times_s = [time_by_stage(step) for step in steps]
    total_s = sum(sum(one.values()) for one in times_s)
    return {stage: sum(one[stage] for one in times_s) / total_s for stage in Stage}


def role_of(title: str, *, parent: str) -> str:
    """Return whose CPU time a process's is, from its title; unknown: that of its parent."""
    return next((role for part, role in TITLES.items() if part in title), parent)


def cpu_s_by_role(process: psutil.Process, *, role: str = CONTROL) -> dict[str, float]:
    """Add up the CPU time of a process and all that it started."""
    totals = dict.fromkeys(ROLES, 0.0)
    try:
        role = role_of(" ".join(process.cmdline()), parent=role)
        times = process.cpu_times()
        children = process.children()
    except psutil.NoSuchProcess:
        return totals
    totals[role] += times.user + times.system
    for child in children:
        for name, cpu_s in cpu_s_by_role(child, role=role).items():
            totals[name] += cpu_s
    return totals


@contextmanager
def _command(
    config: str, overrides: Sequence[str], *, errors: pathlib.Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Start ``opdkit run``; leaving the block early interrupts it."""
    arguments = [sys.executable, "-m", "opdkit.actors.cli", "run", config, "--json", *overrides]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with (
        errors.open("wb") as stderr,
        subprocess.Popen(
            arguments, env=environment, stdout=subprocess.PIPE, stderr=stderr
        ) as process,
    ):
        try:
            yield process
        except BaseException:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(LEAVE_S)
            except subprocess.TimeoutExpired:
                process.kill()
            raise


def _read_at(process: subprocess.Popen[bytes], window: Window) -> Iterator[tuple[int, Reading]]:
    """Read the clocks when the run reports the steps that bound the window."""
    assert process.stdout is not None, "started with a pipe"
    for line in process.stdout:
        record = msgspec.json.decode(line)
        # Only what follows a step has a loss.
        if record["kind"] == "progress" and record["loss"] is not None and record["step"] in window:
            cpu_s = cpu_s_by_role(psutil.Process(process.pid))
            yield record["step"], Reading(perf_counter(), cpu_s)


def _busy(steps: Sequence[Mapping[str, Any]], stage: str) -> float:
    busy_s = sum(float(step[f"{stage}_busy"]) * float(step["step_s"]) for step in steps)
    return busy_s / sum(float(step["step_s"]) for step in steps)
