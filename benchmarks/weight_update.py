# pyright: basic
"""How long until every replica serves the trainer's new weights?

The trainer's ranks, the version board and the student's replicas of a job, each in its process as
in a run, without the rest. An update begins with the weights in the trainer's memory and ends when
every replica has proved that it serves them. Eight streams sample all the while; none may break.
"""

import asyncio
import importlib
import pathlib
import tempfile
from typing import Any

import uvloop

from opdkit.actors.cluster import cluster
from opdkit.actors.scratch import scratch_folders
from opdkit.benchmarks.job_shapes import job_path, read_shape, shape_overrides, shape_values
from opdkit.benchmarks.report import (
    BenchmarkReport,
    Limit,
    check,
    figures_of,
    make_report,
    this_machine,
)

NUM_STREAMS = 8
NUM_UPDATES = 7
QUICK_NUM_UPDATES = 2

MAX_TOTAL_S = 5.0
"""Less than the main job's step takes, so that publication hides behind training."""

COPY = "one copy of the same bytes in memory, measured before each update beside the same streams"


def measure(*, num_runs: int | None, is_quick: bool) -> BenchmarkReport:
    """Measure updates in turn; the one that brings the replicas their first weights is left out."""
    machine = this_machine()
    num_runs = num_runs or (QUICK_NUM_UPDATES if is_quick else NUM_UPDATES)
    with tempfile.TemporaryDirectory(prefix="opdkit-bench-") as folder:
        overrides = shape_overrides(pathlib.Path(folder))
        spec = read_shape(job_path(is_quick=is_quick), overrides=overrides)
        with (
            scratch_folders(pathlib.Path(folder)) as scratch,
            cluster(spec, session=scratch.session),
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            # Ray reads its environment when it is imported: not before the cluster's is set.
            parts: Any = importlib.import_module("opdkit.benchmarks.weight_update_parts")
            updates, replies = runner.run(
                parts.measure_updates(
                    spec,
                    weights_directory=scratch.weights,
                    num_updates=num_runs,
                    num_streams=NUM_STREAMS,
                )
            )
    figures = figures_of(updates) | figures_of([replies])
    limit = Limit(value=figures["copy_s"].median, basis=COPY)
    bounds = [check(figures, "dropped_replies", "==", 0)]
    if not is_quick:
        bounds.append(check(figures, "total_s", "<=", MAX_TOTAL_S))
    return make_report(
        "weight_update",
        machine=machine,
        config={"num_runs": num_runs, "num_streams": NUM_STREAMS, **shape_values(spec)},
        figures=figures,
        limits=dict.fromkeys(("export_s", "apply_s", "total_s"), limit),
        bounds=bounds,
    )
