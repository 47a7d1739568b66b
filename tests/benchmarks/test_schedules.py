"""The schedules that the engine is held against are what they are said to be."""

import pytest

from opdkit.benchmarks.schedules import SIZE, batch_s, make_spec, one_step_off, run_case
from opdkit.engine.simulation import drawn_replies
from opdkit.protocols.config import JobSpec


def spec_of(decoder: str, *, ratio: float = 1.0) -> JobSpec:
    return make_spec(decoder, sigma=0.8, ratio=ratio, seed=0, num_steps=4, lag=1)


def test_a_batch_speeds_up_as_its_replies_end() -> None:
    # Two sequences for 10 tokens, one for 5 more: 0.02 s a step and 0.0002 s a sequence.
    assert batch_s(spec_of("roofline"), [10, 15]) == pytest.approx(10 * 0.0204 + 5 * 0.0202)
    assert batch_s(spec_of("fixed"), [10, 15]) == pytest.approx(15 * 0.02)


def test_generation_takes_its_share_of_training() -> None:
    spec = spec_of("fixed", ratio=2.0)
    replies = drawn_replies(spec)
    batches = [replies[first : first + SIZE] for first in range(0, len(replies), SIZE)]
    generate_s = sum(batch_s(spec, batch) for batch in batches) / len(batches)
    assert generate_s == pytest.approx(2.0 * spec.simulation.train_step_s)


def test_one_step_off_is_as_slow_as_the_longer_of_the_two() -> None:
    spec = spec_of("fixed", ratio=0.01)  # training takes a hundred times as long
    simulation = spec.simulation
    step_s = simulation.train_step_s + simulation.export_s + simulation.update_s
    assert one_step_off(spec) == pytest.approx(SIZE / step_s)


def test_overlap_gains_and_keeps_every_length() -> None:
    figures = run_case("fixed", sigma=0.8, ratio=1.0, seed=0, num_steps=20)
    for lag in (1, 2, 3, 4):
        assert figures[f"lag{lag}_over_in_turn_ratio"] > 1.3
        assert figures[f"lag{lag}_max"] <= lag
        assert 0.9 < figures[f"lag{lag}_reached_ratio"] <= 1.0 + 1e-9
        assert figures[f"lag{lag}_length_ratio"] == pytest.approx(1.0)
