"""Rates come from differences, and the bound is what the run loop stood still for."""

import pytest

from opdkit.engine.stage_report import (
    Stage,
    StepTiming,
    bounding_stage,
    stage_rates,
)
from opdkit.engine.testing_messages import make_meta
from opdkit.protocols.messages import StageMeter


def timing(
    *, batch_wait: float = 0.0, fetch: float = 0.0, train: float = 0.0, publish_wait: float = 0.0
) -> StepTiming:
    return StepTiming(
        batch_wait_s=batch_wait, fetch_s=fetch, train_s=train, publish_wait_s=publish_wait
    )


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


@pytest.mark.parametrize(
    ("timings", "generate_s", "score_s", "stage"),
    [
        ([timing(train=5.0, batch_wait=1.0)], 9.0, 1.0, Stage.TRAINER),
        ([timing(train=1.0, batch_wait=5.0)], 9.0, 1.0, Stage.STUDENT),
        ([timing(train=1.0, batch_wait=5.0)], 1.0, 9.0, Stage.TEACHER),
        ([timing(train=1.0, fetch=2.0)], 9.0, 1.0, Stage.TRANSFER),
        ([timing(train=1.0, publish_wait=2.0)], 9.0, 1.0, Stage.PUBLISHER),
        ([timing(train=1.0, batch_wait=1.0)], 9.0, 1.0, Stage.TRAINER),
        ([timing(train=2.0, batch_wait=9.0), timing(train=8.0)], 9.0, 1.0, Stage.TRAINER),
        ([], 0.0, 0.0, Stage.TRAINER),
    ],
)
def test_the_run_is_bounded_by_what_it_spends_most_time_on(
    timings: list[StepTiming], generate_s: float, score_s: float, stage: Stage
) -> None:
    samples = [make_meta(0, generate_s=generate_s, score_s=score_s)]
    assert bounding_stage(timings, samples) is stage
