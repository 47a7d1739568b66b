"""Rates come from differences, and the bound is what the run loop stood still for."""

import pytest

from opdkit.engine.stage_report import (
    Stage,
    bounding_stage,
    stage_rates,
    time_by_stage,
)
from opdkit.protocols.messages import StageMeter

BEFORE = StageMeter(busy_s=10.0, num_requests=100, num_prompt_tokens=500, num_generated_tokens=900)


def test_rates_are_differences_over_the_time_between() -> None:
    after = StageMeter(
        busy_s=13.0, num_requests=120, num_prompt_tokens=580, num_generated_tokens=1300
    )
    rates = stage_rates(BEFORE, after, elapsed_s=4.0)
    assert rates.busy_fraction == 0.75
    assert rates.requests_per_s == 5.0
    assert rates.prompt_tokens_per_s == 20.0
    assert rates.generated_tokens_per_s == 100.0


def test_a_meter_that_started_again_counts_from_zero() -> None:
    after = StageMeter(busy_s=1.0, num_requests=2, num_prompt_tokens=4, num_generated_tokens=6)
    rates = stage_rates(BEFORE, after, elapsed_s=2.0)
    assert (rates.busy_fraction, rates.generated_tokens_per_s) == (0.5, 3.0)


def test_no_time_between_readings_is_refused() -> None:
    with pytest.raises(ValueError, match="elapsed_s must be above 0, got 0"):
        stage_rates(BEFORE, BEFORE, elapsed_s=0.0)


def step(**changed: float) -> dict[str, float]:
    """Return the record of a step whose samples took longest in the student."""
    times = ("train_s", "batch_wait_s", "fetch_s", "publish_wait_s")
    return dict.fromkeys(times, 0.0) | {"generate_s_mean": 9.0, "score_s_mean": 1.0} | changed


@pytest.mark.parametrize(
    ("record", "stage"),
    [
        (step(train_s=5.0, batch_wait_s=1.0), Stage.TRAINER),
        (step(train_s=1.0, batch_wait_s=5.0), Stage.STUDENT),
        (step(train_s=1.0, batch_wait_s=5.0, score_s_mean=10.0), Stage.TEACHER),
        (step(train_s=1.0, fetch_s=2.0), Stage.TRANSFER),
        (step(train_s=1.0, publish_wait_s=2.0), Stage.PUBLISHER),
        (step(train_s=1.0, batch_wait_s=1.0), Stage.TRAINER),
        (step(), Stage.TRAINER),
    ],
)
def test_a_step_is_bounded_by_what_it_spends_most_time_on(
    record: dict[str, float], stage: Stage
) -> None:
    assert bounding_stage(record) is stage


def test_all_of_the_time_is_put_down_to_a_stage() -> None:
    record = step(train_s=1.0, batch_wait_s=2.0, fetch_s=4.0, publish_wait_s=8.0)
    assert sum(time_by_stage(record).values()) == 15.0
