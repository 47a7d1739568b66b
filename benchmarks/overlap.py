"""What does it gain to let generation, scoring and training run at once?

The same job with ``pipeline.max_policy_lag`` 0 (nobody generates while the trainer trains), 1 and
2, with the same seed, one run of each in turn. The limit is what the processors allow: a stage
computes on one thread, so it handles at most one sample in the CPU time that it spends on one; and
all stages together have no more than the cores there are.
"""

import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from opdkit.benchmarks.job_shapes import job_path, read_shape, shape_overrides, shape_values
from opdkit.benchmarks.measured_job import Window, run_job
from opdkit.benchmarks.report import (
    BenchmarkReport,
    Bound,
    Figure,
    Limit,
    check,
    figures_of,
    make_report,
    num_cores,
    this_machine,
)

LAGS = (0, 1, 2)
NUM_RUNS = 5
QUICK_NUM_RUNS = 2
WINDOW = Window(first=2, last=6)
QUICK_WINDOW = Window(first=1, last=4)
MIN_SPEEDUP = 1.1
"""Of lag 1 over lag 0. On one machine the stages share its cores, so that the gain is what
lag 0 leaves idle; with cores of their own it is more."""

STAGES = ("student", "teacher", "trainer")
"""Whose work on different samples can overlap, each on a thread of its own."""

LIMIT = (
    "the cores of this machine over the CPU time of a sample, or one over the CPU time of the "
    "stage that spends most, whichever is less; CPU times of the same runs"
)


def measure(*, num_runs: int | None, is_quick: bool) -> BenchmarkReport:
    """Run the job again and again; a run of the main job takes minutes."""
    machine = this_machine()
    num_runs = num_runs or (QUICK_NUM_RUNS if is_quick else NUM_RUNS)
    window = QUICK_WINDOW if is_quick else WINDOW
    path = job_path(is_quick=is_quick)
    runs: dict[int, list[dict[str, float]]] = {lag: [] for lag in LAGS}
    config: dict[str, Any] = {}
    for _ in range(num_runs):
        for lag in LAGS:
            with tempfile.TemporaryDirectory(prefix="opdkit-bench-") as folder:
                directory = pathlib.Path(folder)
                overrides = _overrides(directory, lag=lag, window=window)
                config = shape_values(read_shape(path, overrides=overrides))
                runs[lag].append(
                    run_job(path, directory=directory, overrides=overrides, window=window)
                )
    figures = lag_figures(runs, num_cores=num_cores())
    return make_report(
        "overlap",
        machine=machine,
        config={"num_runs": num_runs, "window": window._asdict(), "lags": LAGS, **config},
        figures=figures,
        limits={
            f"lag{lag}.samples_per_s": Limit(
                value=figures[f"lag{lag}.limit_samples_per_s"].median, basis=LIMIT
            )
            for lag in LAGS
        },
        bounds=_bounds(figures, is_quick=is_quick),
    )


def lag_figures(
    runs: Mapping[int, Sequence[Mapping[str, float]]], *, num_cores: int
) -> dict[str, Figure]:
    """Summarise the runs of each lag, their limits, and what each lag gains over lag 0.

    Gains are taken between runs that followed each other, which saw the same machine.
    """
    figures: dict[str, Figure] = {}
    for lag, own in runs.items():
        complete = [
            {
                **run,
                **_limits(run, num_cores=num_cores),
                "speedup_ratio": run["samples_per_s"] / base["samples_per_s"],
            }
            for run, base in zip(own, runs[0], strict=True)
        ]
        summary = figures_of(complete)
        figures |= {f"lag{lag}.{name}": values for name, values in summary.items()}
    return figures


def _limits(run: Mapping[str, float], *, num_cores: int) -> dict[str, float]:
    busiest_s = max(run[f"{role}_cpu_s_per_sample"] for role in STAGES)
    limit = min(1 / busiest_s, num_cores / run["cpu_s_per_sample"])
    return {
        "stage_limit_samples_per_s": 1 / busiest_s,
        "cores_limit_samples_per_s": num_cores / run["cpu_s_per_sample"],
        "limit_samples_per_s": limit,
        "limit_fraction": run["samples_per_s"] / limit,
    }


def _overrides(folder: pathlib.Path, *, lag: int, window: Window) -> list[str]:
    # So many steps behind the window draw on prompts that are drawn within it: without them,
    # nothing would be left to generate at its end.
    num_steps = window.last + lag + 1
    return [
        *shape_overrides(folder),
        f"pipeline.max_policy_lag={lag}",
        f"pipeline.num_steps={num_steps}",
        f"checkpoint.every_steps={num_steps}",
    ]


def _bounds(figures: Mapping[str, Figure], *, is_quick: bool) -> list[Bound]:
    bounds = [check(figures, f"lag{lag}.lag_max", "<=", lag) for lag in LAGS]
    bounds += [check(figures, f"lag{lag}.missing_samples", "==", 0) for lag in LAGS]
    if not is_quick:  # a micro model's step is all overhead
        bounds.append(check(figures, "lag1.speedup_ratio", ">=", MIN_SPEEDUP))
    return bounds
