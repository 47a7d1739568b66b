"""From clocks and metrics to the figures of a window."""

import pathlib
import subprocess
import sys
from typing import Any

import psutil  # type: ignore[import-untyped]  # publishes no types
import pytest

from opdkit.benchmarks.measured_job import (
    CONTROL,
    ROLES,
    Reading,
    Window,
    bound_shares,
    cpu_s_by_role,
    role_of,
    run_job,
    window_figures,
)
from opdkit.protocols.errors import JobFailed


def step(**values: float) -> dict[str, Any]:
    """Return the metrics of a step of 8 samples in 2 s."""
    metrics = {
        "num_samples": 8,
        "generated_tokens_mean": 16.0,
        "lag_max": 1,
        "ledger_missing": 0,
        "step_s": 2.0,
        "train_s": 1.0,
        "fetch_s": 0.0,
        "publish_wait_s": 0.0,
        "batch_wait_s": 1.0,
        "generate_s_mean": 1.0,
        "score_s_mean": 0.5,
        "student_busy": 0.5,
        "teacher_busy": 0.25,
        "trainer_busy": 0.5,
    }
    return metrics | values


def reading(wall_s: float, **cpu_s: float) -> Reading:
    return Reading(wall_s, dict.fromkeys(ROLES, 0.0) | cpu_s)


@pytest.mark.parametrize(
    ("title", "role"),
    [
        ("ray::ServeReplica:smollm2-student:student", "student"),
        ("ray::ServeReplica:smollm2-teacher:teacher.score", "teacher"),
        ("ray::ServeReplica:smollm2-rollouts:rollouts", "rollouts"),
        ("ray::TrainerRank.train", "trainer"),
        ("VLLM::EngineCore", "its parent's"),
    ],
)
def test_a_process_is_known_by_its_title(title: str, role: str) -> None:
    assert role_of(title, parent="its parent's") == role


def test_the_cpu_time_of_started_processes_counts() -> None:
    code = "import sys; sum(range(3_000_000)); print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, "x-teacher:teacher"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        totals = cpu_s_by_role(psutil.Process())
        child.communicate()
    assert totals["teacher"] > 0
    assert totals[CONTROL] > 0
    assert totals["student"] == 0


def test_rates_and_cpu_times_are_taken_between_the_readings() -> None:
    figures = window_figures(
        [step(), step(lag_max=2, generated_tokens_mean=18.0)],
        reading(100.0, student=5.0, control=1.0),
        reading(104.0, student=8.2, control=1.8),
    )
    assert figures["samples_per_s"] == 4.0
    assert figures["student_cpu_s_per_sample"] == pytest.approx(0.2)
    assert figures["cpu_s_per_sample"] == pytest.approx(0.25)
    assert figures["trainer_cpu_s_per_sample"] == 0.0
    assert figures["tokens_per_sample"] == 17.0
    assert figures["lag_max"] == 2


def test_busy_fractions_are_weighted_by_the_length_of_the_step() -> None:
    steps = [step(step_s=1.0, student_busy=1.0), step(step_s=3.0, student_busy=0.0)]
    figures = window_figures(steps, reading(0.0), reading(4.0))
    assert figures["student_busy_fraction"] == 0.25


def test_a_wait_for_samples_is_put_down_to_whoever_took_longer_over_them() -> None:
    shares = bound_shares([step(), step(score_s_mean=3.0, publish_wait_s=1.0)])
    assert shares == {
        "trainer": 0.4,
        "student": 0.2,
        "teacher": 0.2,
        "transfer": 0.0,
        "publisher": 0.2,
    }


def test_a_run_that_fails_tells_why(tmp_path: pathlib.Path) -> None:
    config = str(tmp_path / "none.yaml")
    with pytest.raises(JobFailed, match=r"ended with 2 after 0 readings: .*none\.yaml"):
        run_job(config, directory=tmp_path, overrides=[], window=Window(1, 2))
