"""Does the machine have the GPUs that a job reserves, and can its folder be made?"""

import pathlib

from opdkit.actors.checks.preflight_report import Finding, error, good
from opdkit.protocols.config import JobSpec


def check_gpus(spec: JobSpec, num_gpus: int) -> list[Finding]:
    """Compare what a private cluster must hold with the GPUs of this machine.

    Args:
        spec: The job.
        num_gpus: GPUs of this machine.
    """
    wanted = _reservations(spec)
    total = sum(wanted.values())
    if spec.cluster.address is not None or not total:
        return []
    facts = ", ".join(f"{field} {num:g}" for field, num in wanted.items() if num)
    if total > num_gpus:
        return [
            error(
                "gpus",
                f"the job reserves {total:g} GPUs ({facts}, over all its processes), but this "
                f"machine has {num_gpus}",
            )
        ]
    return [good("gpus", f"{total:g} of {num_gpus}: {facts}")]


def _reservations(spec: JobSpec) -> dict[str, float]:
    """Return the GPUs of all processes of a kind, by the field that says how many one takes."""
    rollout, trainer = spec.rollout, spec.trainer
    numbers = {
        "student": spec.student.replicas * spec.student.placement.num_gpus,
        **{
            f"teachers[{index}]": teacher.replicas * teacher.placement.num_gpus
            for index, teacher in enumerate(spec.teachers)
        },
        "rollout": rollout.workers * rollout.placement.num_gpus,
        "trainer": trainer.parallel.world_size * trainer.placement.num_gpus,
    }
    return {f"{section}.placement.num_gpus": number for section, number in numbers.items()}


def check_run_directory(spec: JobSpec) -> list[Finding]:
    """Say what keeps the run's folder from being made, without making it."""
    directory = spec.job.directory
    if "\0" in directory:
        problem = "holds a NUL character, which no path may"
    else:
        try:
            problem = _obstacle(pathlib.Path(directory))
        except OSError as failure:
            problem = f"cannot be looked at: {failure.strerror}"
    if not problem:
        return []
    return [error("job.run_dir", f"job.run_dir is {directory!r}, but {problem}")]


def _obstacle(directory: pathlib.Path) -> str:
    there = next(path for path in (directory, *directory.parents) if path.exists())
    return "" if there.is_dir() else f"{str(there)!r} is no folder"
