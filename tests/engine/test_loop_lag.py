"""A loop that is blocked is late, and one that is not watched has no timer."""

import asyncio
import time

import pytest

from opdkit.engine.loop_lag import LoopLag
from opdkit.engine.testing import VirtualTimeLoop
from tests.conftest import Run


def test_a_blocked_loop_shows(run: Run) -> None:
    lag = LoopLag(interval_s=0.005)

    async def scenario() -> None:
        with lag.watching():
            until = time.monotonic() + 0.04
            while time.monotonic() < until:  # what a blocking call would do to the loop
                pass
            await asyncio.sleep(0.01)

    run(scenario())
    assert lag.p99_s() > 0.02


def test_an_idle_loop_is_punctual_and_watched_only_as_long_as_asked() -> None:
    lag = LoopLag(interval_s=0.05)

    async def scenario() -> None:
        with lag.watching():
            with lag.watching():
                await asyncio.sleep(1)
            await asyncio.sleep(1)
        await asyncio.sleep(1000)

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(scenario())
    assert lag.p99_s() == pytest.approx(0.0)


def test_without_a_measurement_there_is_no_lag() -> None:
    assert LoopLag().p99_s() == 0.0
