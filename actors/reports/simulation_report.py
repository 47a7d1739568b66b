"""What a simulation says: of the job, and of the job with one more replica of each kind."""

from collections.abc import Iterator
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text

from opdkit.actors.reports.progress import duration
from opdkit.actors.reports.run_report import NAME_WIDTH
from opdkit.engine.simulation import SimulationReport, simulate, with_one_more
from opdkit.engine.stage_report import Stage
from opdkit.protocols.config import JobSpec

SCALABLE = {
    Stage.STUDENT: "+1 student replica",
    Stage.TEACHER: "+1 teacher replica",
    Stage.TRAINER: "+1 data rank",
}


class Sizing(msgspec.Struct, frozen=True, kw_only=True):
    """A simulated job, and its neighbours."""

    name: str
    report: SimulationReport
    gains: dict[Stage, float]
    """By the stage that has one more: samples per second over those of the job, less 1."""


def size_job(spec: JobSpec) -> Sizing:
    """Simulate the job, and the job with one more of each kind.

    Raises:
        JobFailed, ConfigError: as a run does.
    """
    report = simulate(spec)
    gains = {
        stage: simulate(with_one_more(spec, stage)).samples_per_s / report.samples_per_s - 1.0
        for stage in SCALABLE
    }
    return Sizing(name=spec.job.name, report=report, gains=gains)


def sizing_values(sizing: Sizing) -> dict[str, Any]:
    """Return plain values, with what follows from the figures."""
    report = sizing.report
    values: dict[str, Any] = msgspec.to_builtins(sizing, str_keys=True)
    values["report"]["bounding_stage"] = str(report.bounding_stage)
    values["report"]["bounds"]["together"] = report.bounds.together
    values["report"]["reached"] = report.reached
    return values


def print_sizing(sizing: Sizing, console: Console) -> None:
    """Print the page for people."""
    report = sizing.report
    headline = f"{report.num_trained:,} samples in {duration(report.virtual_s)} of virtual time"
    console.print(Text.assemble((f"{sizing.name} simulated", "bold"), f": {headline}"))
    for name, value in _facts(sizing):
        console.print(Text.assemble((f"{name:{NAME_WIDTH}}", "dim"), value), soft_wrap=True)


def _facts(sizing: Sizing) -> Iterator[tuple[str, str]]:
    report, bounds = sizing.report, sizing.report.bounds
    yield "samples/s", f"{report.samples_per_s:.3f}, {report.reached:.1%} of the bound"
    yield (
        "bounds",
        f"student {bounds.student:.3f}, teacher {bounds.teacher:.3f}, "
        f"trainer {bounds.trainer:.3f}, lag {bounds.lag:.3f} samples/s",
    )
    share = report.shares[report.bounding_stage]
    yield (
        "bound by",
        f"{report.bounding_stage}: {share:.0%} of the time was spent in it or waiting for it",
    )
    lags = ", ".join(f"{lag}: {count}" for lag, count in report.lags.items())
    yield "lag", f"mean {report.mean_lag:.2f}; steps by their largest: {lags}"
    yield "trained length", f"{report.length_ratio:.4f} of the length drawn"
    for stage, gain in sizing.gains.items():
        yield SCALABLE[stage], f"{round(gain, 3) + 0.0:+.1%}"
