"""Busy time is the union of the requests' intervals."""

import pytest

from opdkit.engine.stage_watch import StageWatch
from opdkit.engine.testing import FakeClock


def test_overlapping_requests_count_once_and_gaps_not_at_all() -> None:
    clock = FakeClock()
    watch = StageWatch(clock)
    with watch.request(num_prompt_tokens=5):
        clock.advance(1)
        with watch.request(num_prompt_tokens=7):
            clock.advance(2)
        clock.advance(3)
    clock.advance(100)
    with watch.request(num_prompt_tokens=0):
        clock.advance(4)
    meter = watch.read()
    assert meter.busy_s == 10
    assert (meter.num_requests, meter.num_prompt_tokens) == (3, 12)


def test_a_reading_includes_what_is_in_flight() -> None:
    clock = FakeClock()
    watch = StageWatch(clock)
    with watch.request(num_prompt_tokens=0):
        clock.advance(2)
        watch.add_generated(3)
        assert watch.read().busy_s == 2
        assert watch.read().num_generated_tokens == 3


def test_a_failed_request_was_busy_but_not_served() -> None:
    clock = FakeClock()
    watch = StageWatch(clock)
    with pytest.raises(KeyError), watch.request(num_prompt_tokens=0):
        clock.advance(1)
        raise KeyError
    assert watch.read().busy_s == 1
    assert watch.num_served == 0
