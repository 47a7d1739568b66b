"""Sequences share a decoder's steps, and know which weights made their tokens."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from opdkit.engine.simulation.decoder import SharedDecoder
from opdkit.engine.testing import VirtualTimeLoop
from opdkit.protocols.ids import PolicyVersion


def run_in_virtual_time(work: Coroutine[Any, Any, None]) -> None:
    """Run, and check that no task is left."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(work)
        assert not asyncio.all_tasks(runner.get_loop())


def decoder(*, sequence_s: float = 0.0, max_active: int = 8) -> SharedDecoder:
    return SharedDecoder(step_s=1.0, sequence_s=sequence_s, max_active=max_active)


async def ends_of(shared: SharedDecoder, *lengths: int) -> list[float]:
    """Decode replies at once on fresh weights; return when each ended."""
    ends: dict[int, float] = {}

    async def decode(index: int, length: int) -> None:
        await shared.decode(length)
        ends[index] = asyncio.get_running_loop().time()

    await shared.stand_still(0.0, PolicyVersion(0))
    async with asyncio.TaskGroup() as tasks:
        for index, length in enumerate(lengths):
            tasks.create_task(decode(index, length))
    return [ends[index] for index in range(len(lengths))]


@pytest.mark.parametrize(
    ("changed", "lengths", "ends"),
    [
        ({}, (3, 5), [3.0, 5.0]),
        # Two sequences: a step of 1 + 2 * 0.5 s until the first ends, then 1.5 s.
        ({"sequence_s": 0.5}, (3, 5), [6.0, 9.0]),
        ({"max_active": 1}, (3, 5, 1), [3.0, 8.0, 9.0]),
        ({"max_active": 2}, (3, 5, 1), [3.0, 5.0, 4.0]),
    ],
)
def test_sequences_advance_together(
    changed: dict[str, Any], lengths: tuple[int, ...], ends: list[float]
) -> None:
    async def check() -> None:
        assert await ends_of(decoder(**changed), *lengths) == pytest.approx(ends)

    run_in_virtual_time(check())


def test_tokens_are_of_the_weights_that_made_them() -> None:
    async def check() -> None:
        shared = decoder()
        await shared.stand_still(0.0, PolicyVersion(3))
        async with asyncio.TaskGroup() as tasks:
            decoding = tasks.create_task(shared.decode(6))
            await asyncio.sleep(2.5)
            await shared.stand_still(1.0, PolicyVersion(4))
        spans = [(span.policy_version, span.num_tokens) for span in decoding.result()]
        assert spans == [(3, 2), (4, 4)]
        assert asyncio.get_running_loop().time() == pytest.approx(7.0)

    run_in_virtual_time(check())


def test_nothing_is_decoded_before_the_first_weights() -> None:
    async def check() -> None:
        shared = decoder()
        async with asyncio.TaskGroup() as tasks:
            decoding = tasks.create_task(shared.decode(2))
            await asyncio.sleep(10.0)
            await shared.stand_still(1.0, PolicyVersion(0))
        assert asyncio.get_running_loop().time() == pytest.approx(13.0)
        assert [span.policy_version for span in decoding.result()] == [0]

    run_in_virtual_time(check())


def test_a_cancelled_sequence_makes_room() -> None:
    async def check() -> None:
        shared = decoder(max_active=1, sequence_s=1.0)
        await shared.stand_still(0.0, PolicyVersion(0))
        async with asyncio.TaskGroup() as tasks:
            long = tasks.create_task(shared.decode(1000))
            tasks.create_task(shared.decode(2))
            await asyncio.sleep(3.0)
            long.cancel()
        assert asyncio.get_running_loop().time() == pytest.approx(7.0)
        assert shared.num_requests == 0

    run_in_virtual_time(check())


def test_short_steps_late_in_a_long_job_end_too() -> None:
    async def check() -> None:
        shared = SharedDecoder(step_s=1e-9, sequence_s=0.0, max_active=2)
        await asyncio.sleep(1e6)
        await shared.stand_still(0.0, PolicyVersion(0))
        [span] = await shared.decode(10)
        assert span.num_tokens == 10

    run_in_virtual_time(check())
