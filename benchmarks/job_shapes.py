"""The jobs that benchmarks measure on: the shipped examples, cut to what is measured.

Their paths are relative, as in the examples: benchmarks of whole jobs run from the repository.
"""

import pathlib
from collections.abc import Sequence

import msgspec

from opdkit.actors.checks.preflight import check_job
from opdkit.actors.files.config_file import read_job
from opdkit.protocols.config import JobSpec

MAIN_JOB = "examples/smollm2.yaml"
QUICK_JOB = "examples/micro.yaml"
SHAPE_SECTIONS = ("student", "teachers", "rollout", "loss", "trainer", "pipeline")


def job_path(*, is_quick: bool) -> str:
    """Return the file of the job to measure on."""
    return QUICK_JOB if is_quick else MAIN_JOB


def shape_overrides(run_dir: pathlib.Path) -> list[str]:
    """Return what a benchmark changes of any job: where it runs, and no evaluation."""
    return [f"job.run_dir={run_dir}", "data.held_out=null", "logging.tensorboard=false"]


def read_shape(path: str, *, overrides: Sequence[str]) -> JobSpec:
    """Read a job and check it.

    Raises:
        ConfigError: the file, a model or the data is missing.
    """
    spec = read_job(path, overrides=overrides)
    check_job(spec).require()
    return spec


def shape_values(spec: JobSpec) -> dict[str, object]:
    """Return what a report's ``config`` says of a job: all but where it was run."""
    values: dict[str, object] = msgspec.to_builtins(spec)
    job = {"name": spec.job.name, "seed": spec.job.seed}
    return {"job": job} | {name: values[name] for name in SHAPE_SECTIONS}
