"""No waiter of the queue is lost, cancelled or closed in vain."""

import asyncio
import random

import pytest

from opdkit.engine.sample_queue import LeaseQueue
from opdkit.engine.testing.clocks import FakeClock
from opdkit.engine.testing_run import loop_turns
from opdkit.protocols.messages import Demand
from tests.conftest import Run
from tests.engine.queue_calls import (
    cancelled,
    fails_with_closed,
    fill,
    ids_of,
    lease,
    make_queue,
    ordinals_of,
    put,
    settle,
)

# Cancelling


def test_a_cancelled_put_leaves_nothing_and_lets_the_next_one_go(run: Run) -> None:
    async def scenario() -> None:
        queue = make_queue(max_bytes=10)
        await put(queue, 0, num_bytes=6)
        async with asyncio.TaskGroup() as tasks:
            large = tasks.create_task(put(queue, 1, num_bytes=9))
            small = tasks.create_task(put(queue, 2, num_bytes=2))
            await settle()
            assert not small.done()
            await cancelled(large)
            await settle()
            assert small.done()
        assert queue.depth.num_bytes == 8

    run(scenario())


def test_a_put_cancelled_as_it_is_woken_passes_its_turn_on(run: Run) -> None:
    async def scenario() -> None:
        queue = make_queue(max_samples=1)
        await put(queue, 0)
        batch = await lease(queue, 1)
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(put(queue, 1))
            second = tasks.create_task(put(queue, 2))
            await settle()
            await queue.acknowledge(ids_of(batch))
            await cancelled(first)
            await second
        assert ordinals_of(await lease(queue, 1)) == [2]

    run(scenario())


def test_a_cancelled_lease_loses_nothing(run: Run) -> None:
    async def scenario() -> None:
        queue = make_queue()
        async with asyncio.TaskGroup() as tasks:
            leasing = tasks.create_task(lease(queue, 2))
            await put(queue, 0)
            await settle()
            await cancelled(leasing)
        await put(queue, 1)
        assert queue.depth.num_leased == 0
        assert ordinals_of(await queue.lease()) == [0, 1]

    run(scenario())


def test_a_lease_cancelled_as_it_is_woken_passes_its_turn_on(run: Run) -> None:
    async def scenario() -> None:
        queue = make_queue()
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(lease(queue, 1))
            second = tasks.create_task(queue.lease())
            await settle()
            await put(queue, 0)
            await cancelled(first)
            assert ordinals_of(await second) == [0]

    run(scenario())


def test_a_cancelled_lease_ends_its_overdraft(run: Run) -> None:
    async def scenario() -> None:
        queue = make_queue(max_samples=1)
        await put(queue, 0, due=2)
        await queue.set_demand(Demand(count=2, quotas=((1, 2),)))
        async with asyncio.TaskGroup() as tasks:
            leasing = tasks.create_task(queue.lease())
            await settle()
            await cancelled(leasing)
            putting = tasks.create_task(put(queue, 1, due=1))
            await settle()
            assert not putting.done()
            await cancelled(putting)

    run(scenario())


# Closing


def test_close_wakes_every_waiter(run: Run) -> None:
    async def scenario() -> None:
        queue = make_queue(max_samples=1)
        await put(queue, 0)
        await queue.set_demand(Demand(count=2, quotas=((-1, 1),)))
        async with asyncio.TaskGroup() as tasks:
            for ordinal in (1, 2):
                tasks.create_task(fails_with_closed(put(queue, ordinal)))
            for _ in range(2):
                tasks.create_task(fails_with_closed(queue.lease()))
            await settle()
            await queue.close()
            await queue.close()
        assert queue.depth.num_held_puts == 0

    run(scenario())


def test_nothing_passes_through_a_closed_queue(run: Run) -> None:
    async def scenario() -> None:
        queue = make_queue()
        await fill(queue, [0, 1])
        batch = await lease(queue, 1)
        await queue.close()
        await fails_with_closed(put(queue, 2))
        await fails_with_closed(queue.lease())
        await fails_with_closed(queue.fetch(ids_of(batch)))
        await queue.acknowledge(ids_of(batch))  # bookkeeping of what did pass
        await queue.return_leases()

    run(scenario())


# The whole


def test_depth_counts_leased_samples_and_the_age_of_the_oldest(run: Run) -> None:
    async def scenario() -> None:
        clock = FakeClock()
        queue = LeaseQueue(max_samples=2, max_bytes=100, clock=clock)
        assert queue.depth.oldest_age_s == 0.0
        await put(queue, 0, num_bytes=10)
        clock.advance(2.0)
        await put(queue, 1, num_bytes=5)
        clock.advance(3.0)
        async with asyncio.TaskGroup() as tasks:
            putting = tasks.create_task(put(queue, 2))
            await settle()
            batch = await lease(queue, 1)
            depth = queue.depth
            assert (depth.num_samples, depth.num_leased, depth.num_bytes) == (2, 1, 15)
            assert depth.num_held_puts == 1
            assert depth.oldest_age_s == 5.0
            await queue.acknowledge(ids_of(batch))
            assert queue.depth.oldest_age_s == 3.0
            await putting

    run(scenario())


@pytest.mark.parametrize("seed", range(5))
def test_each_sample_is_trained_once_though_producers_and_consumers_die(
    run: Run, seed: int
) -> None:
    num_samples = 120
    rng = random.Random(seed)

    async def produce(queue: LeaseQueue, ordinals: list[int]) -> None:
        for ordinal in ordinals:
            await loop_turns(rng.randrange(4))()
            for _ in range(rng.randrange(3)):  # tries that die or time out before the last
                try:
                    async with asyncio.timeout(0):
                        await put(queue, ordinal, due=ordinal // 4, num_bytes=rng.randint(1, 9))
                except TimeoutError:
                    pass
            await put(queue, ordinal, due=ordinal // 4, num_bytes=rng.randint(1, 9))

    async def consume(queue: LeaseQueue) -> list[int]:
        trained: list[int] = []
        while len(trained) < num_samples:
            try:
                async with asyncio.timeout(0) if rng.random() < 0.3 else asyncio.timeout(None):
                    batch = await lease(queue, 4)
            except TimeoutError:
                continue
            await loop_turns(rng.randrange(6))()
            if rng.random() < 0.2:
                await queue.return_leases()
                continue
            await queue.acknowledge(ids_of(batch))
            trained += ordinals_of(batch)
        return trained

    async def scenario() -> None:
        queue = make_queue(max_samples=5, max_bytes=20)
        async with asyncio.TaskGroup() as tasks:
            for first in range(4):
                tasks.create_task(produce(queue, list(range(first, num_samples, 4))))
            trained = await consume(queue)
        assert sorted(trained) == list(range(num_samples))
        assert queue.depth.num_samples == 0

    run(scenario())
