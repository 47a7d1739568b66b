"""The limits that processors set, and what a lag gains."""

import pytest

from opdkit.benchmarks.overlap import lag_figures


def run(samples_per_s: float, **cpu_s: float) -> dict[str, float]:
    stages = {"student": 0.0, "teacher": 0.0, "trainer": 0.0} | cpu_s
    return {
        "samples_per_s": samples_per_s,
        "cpu_s_per_sample": sum(stages.values()),
        **{f"{stage}_cpu_s_per_sample": value for stage, value in stages.items()},
    }


def test_the_busiest_stage_limits_a_machine_of_many_cores() -> None:
    runs = {0: [run(1.0, student=0.25, teacher=0.2, trainer=0.1)]}
    figures = lag_figures(runs, num_cores=64)
    assert figures["lag0.limit_samples_per_s"].median == 4.0
    assert figures["lag0.limit_fraction"].median == 0.25


def test_the_cores_limit_what_runs_on_too_few() -> None:
    runs = {0: [run(1.0, student=0.25, teacher=0.25, trainer=0.5)]}
    figures = lag_figures(runs, num_cores=1)
    assert figures["lag0.cores_limit_samples_per_s"].median == 1.0
    assert figures["lag0.limit_samples_per_s"].median == 1.0
    assert figures["lag0.limit_fraction"].median == 1.0


def test_a_gain_is_taken_within_one_round_of_runs() -> None:
    fast_hour, slow_hour = 10.0, 1.0
    runs = {
        0: [run(fast_hour, student=0.1), run(slow_hour, student=0.1)],
        1: [run(1.5 * fast_hour, student=0.1), run(1.5 * slow_hour, student=0.1)],
    }
    gain = lag_figures(runs, num_cores=2)["lag1.speedup_ratio"]
    assert gain.median == pytest.approx(1.5)
    assert gain.spread == pytest.approx(0.0)
