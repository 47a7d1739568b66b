"""The queue is bounded, ordered and exact."""

import asyncio

import msgspec
import pytest

from opdkit.engine.testing_messages import make_meta
from opdkit.protocols.messages import Demand
from tests.conftest import Run
from tests.engine.queue_calls import (
    cancelled,
    fill,
    ids_of,
    lease,
    make_queue,
    ordinals_of,
    put,
    settle,
)

# Order and demand


def test_samples_leave_earliest_due_first_then_in_order_of_drawing(run: Run) -> None:
    async def scenario() -> None:
        queue = make_queue()
        for ordinal, due in [(5, 2), (3, 2), (9, 1), (1, 3)]:
            await put(queue, ordinal, due=due)
        assert ordinals_of(await lease(queue, 3)) == [9, 3, 5]

    run(scenario())


def test_a_lease_waits_for_its_count(run: Run) -> None:
    async def scenario() -> None:
        queue = make_queue()
        async with asyncio.TaskGroup() as tasks:
            leasing = tasks.create_task(lease(queue, 2))
            await put(queue, 0)
            await settle()
            assert not leasing.done()
            await put(queue, 1)
        assert ordinals_of(leasing.result()) == [0, 1]

    run(scenario())


def test_a_lease_waits_for_its_quotas_though_enough_is_finished(run: Run) -> None:
    async def scenario() -> None:
        queue = make_queue()
        await queue.set_demand(Demand(count=2, quotas=((1, 1),)))
        async with asyncio.TaskGroup() as tasks:
            leasing = tasks.create_task(queue.lease())
            await fill(queue, [4, 5, 6], due=2)
            await settle()
            assert not leasing.done()
            await put(queue, 7, due=1)
        assert ordinals_of(leasing.result()) == [7, 4]

    run(scenario())


def test_a_waiting_lease_sees_a_new_demand_at_once(run: Run) -> None:
    async def scenario() -> None:
        queue = make_queue()
        await put(queue, 0)
        async with asyncio.TaskGroup() as tasks:
            leasing = tasks.create_task(lease(queue, 2))
            await settle()
            await queue.set_demand(Demand(count=1))
        assert ordinals_of(leasing.result()) == [0]

    run(scenario())


def test_a_demand_for_nothing_ends_a_waiting_lease_with_nothing(run: Run) -> None:
    async def scenario() -> None:
        queue = make_queue()
        await put(queue, 0)
        await queue.set_demand(Demand(count=2))
        async with asyncio.TaskGroup() as tasks:
            leases = [tasks.create_task(queue.lease()) for _ in range(2)]
            await settle()
            await queue.set_demand(Demand(count=0))
            await settle()
            assert [leasing.result() for leasing in leases] == [[], []]
        assert await queue.lease() == []
        assert queue.depth.num_leased == 0

    run(scenario())


# Bounds


def test_a_full_queue_holds_the_producer_until_a_lease_is_acknowledged(run: Run) -> None:
    async def scenario() -> None:
        queue = make_queue(max_samples=2)
        await fill(queue, [0, 1])
        async with asyncio.TaskGroup() as tasks:
            putting = tasks.create_task(put(queue, 2))
            batch = await lease(queue, 1)
            await settle()
            assert not putting.done()
            await queue.acknowledge(ids_of(batch))
        assert queue.depth.num_samples == 2

    run(scenario())


def test_a_queue_full_of_bytes_holds_the_producer(run: Run) -> None:
    async def scenario() -> None:
        queue = make_queue(max_bytes=10)
        await put(queue, 0, num_bytes=6)
        async with asyncio.TaskGroup() as tasks:
            putting = tasks.create_task(put(queue, 1, num_bytes=5))
            batch = await lease(queue, 1)
            await settle()
            assert not putting.done()
            await queue.acknowledge(ids_of(batch))

    run(scenario())


def test_a_payload_above_the_byte_bound_enters_an_empty_queue_only(run: Run) -> None:
    async def scenario() -> None:
        queue = make_queue(max_bytes=10)
        await put(queue, 0)
        async with asyncio.TaskGroup() as tasks:
            putting = tasks.create_task(put(queue, 1, num_bytes=50))
            await settle()
            assert not putting.done()
            await queue.acknowledge(ids_of(await lease(queue, 1)))
            await settle()
        assert queue.depth.num_bytes == 50

    run(scenario())


def test_held_producers_enter_earliest_due_first(run: Run) -> None:
    async def scenario() -> None:
        queue = make_queue(max_samples=1)
        await put(queue, 0)
        async with asyncio.TaskGroup() as tasks:
            late = tasks.create_task(put(queue, 1, due=2))
            await settle()
            early = tasks.create_task(put(queue, 2, due=1))
            await queue.acknowledge(ids_of(await lease(queue, 1)))
            await settle()
            assert early.done()
            assert not late.done()
            await queue.acknowledge(ids_of(await lease(queue, 1)))

    run(scenario())


def test_hundreds_of_held_producers_do_not_keep_the_consumer_out(run: Run) -> None:
    async def scenario() -> None:
        queue = make_queue(max_samples=4)
        taken: list[int] = []
        async with asyncio.TaskGroup() as tasks:
            for ordinal in range(300):
                tasks.create_task(put(queue, ordinal, due=ordinal // 4))
            while len(taken) < 300:
                batch = await lease(queue, 4)
                taken += ordinals_of(batch)
                await queue.acknowledge(ids_of(batch))
        assert taken == list(range(300))

    run(scenario())


# Overdraft


def test_a_lease_that_waits_lets_in_what_it_lacks_though_leased_samples_fill_the_queue(
    run: Run,
) -> None:
    async def scenario() -> None:
        queue = make_queue(max_samples=2)
        await fill(queue, [0, 1])
        await lease(queue, 2)
        async with asyncio.TaskGroup() as tasks:
            putting = [tasks.create_task(put(queue, ordinal)) for ordinal in range(2, 7)]
            await settle()
            assert queue.depth.num_samples == 2  # nobody waits for them yet
            assert ordinals_of(await lease(queue, 2)) == [2, 3]
            await settle()
            assert [task.done() for task in putting] == [True, True, False, False, False]
            for task in putting[2:]:
                await cancelled(task)

    run(scenario())


def test_the_overdraft_lets_in_no_more_than_the_count(run: Run) -> None:
    async def scenario() -> None:
        queue = make_queue(max_samples=1)
        await put(queue, 0, due=9)
        await queue.set_demand(Demand(count=3, quotas=((1, 1), (2, 2))))
        async with asyncio.TaskGroup() as tasks:
            leasing = tasks.create_task(queue.lease())
            late = [tasks.create_task(put(queue, n, due=9)) for n in (10, 11, 12)]
            await settle()
            assert queue.depth.num_samples == 1  # the one place for a late sample is taken
            middle = [tasks.create_task(put(queue, n, due=2)) for n in (7, 8)]
            await settle()
            assert [task.done() for task in middle] == [True, False]
            urgent = tasks.create_task(put(queue, 3, due=1))
            assert ordinals_of(await leasing) == [3, 7, 0]
            assert queue.depth.num_samples == 3
            for task in (*late, middle[1]):
                await cancelled(task)
            await urgent

    run(scenario())


def test_a_payload_above_the_byte_bound_enters_for_a_lease_that_lacks_it(run: Run) -> None:
    async def scenario() -> None:
        queue = make_queue(max_bytes=10)
        await put(queue, 0)
        async with asyncio.TaskGroup() as tasks:
            leasing = tasks.create_task(lease(queue, 2))
            await put(queue, 1, num_bytes=50)
        assert ordinals_of(leasing.result()) == [0, 1]

    run(scenario())


def test_a_producer_that_puts_one_by_one_is_let_in_before_the_batch_is_complete(run: Run) -> None:
    async def scenario() -> None:
        queue = make_queue(max_samples=1)
        async with asyncio.TaskGroup() as tasks:
            leasing = tasks.create_task(lease(queue, 3))
            await fill(queue, [0, 1, 2])
        assert ordinals_of(leasing.result()) == [0, 1, 2]

    run(scenario())


# Exactness


def test_a_second_put_changes_nothing_be_the_sample_ready_leased_or_trained(run: Run) -> None:
    async def scenario() -> None:
        queue = make_queue(max_samples=1)
        await put(queue, 0)
        await put(queue, 0)
        batch = await lease(queue, 1)
        await put(queue, 0)
        assert queue.depth.num_samples == 1
        await queue.acknowledge(ids_of(batch))
        await put(queue, 0)
        assert queue.depth.num_samples == 0

    run(scenario())


def test_two_held_puts_of_one_sample_bring_it_once(run: Run) -> None:
    async def scenario() -> None:
        queue = make_queue(max_samples=1)
        await put(queue, 0)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(put(queue, 1))
            tasks.create_task(put(queue, 1))
            await queue.acknowledge(ids_of(await lease(queue, 1)))
        assert ordinals_of(await lease(queue, 1)) == [1]
        assert queue.depth.num_samples == 1

    run(scenario())


def test_another_sample_of_the_same_ordinal_is_refused(run: Run) -> None:
    async def scenario() -> None:
        queue = make_queue()
        await put(queue, 0)
        impostor = msgspec.structs.replace(make_meta(0), sample_id="impostor")
        with pytest.raises(ValueError, match="'impostor' has ordinal 0, under which 'sample-0'"):
            await queue.put(impostor, b"")
        assert queue.depth.num_held_puts == 0

    run(scenario())


def test_payloads_are_fetched_in_the_order_asked(run: Run) -> None:
    async def scenario() -> None:
        queue = make_queue()
        await fill(queue, [7, 8, 9])
        await lease(queue, 2)
        assert await queue.fetch(["sample-8", "sample-7"]) == [b"\x08", b"\x07"]
        with pytest.raises(ValueError, match="sample 'sample-9' is not leased"):
            await queue.fetch(["sample-7", "sample-9"])

    run(scenario())


def test_only_leased_samples_can_be_acknowledged_and_then_all_or_none(run: Run) -> None:
    async def scenario() -> None:
        queue = make_queue()
        await fill(queue, [0, 1])
        await lease(queue, 1)
        with pytest.raises(ValueError, match="sample 'sample-1' is not leased"):
            await queue.acknowledge(["sample-0", "sample-1"])
        assert queue.depth.num_samples == 2
        for _ in range(2):  # an acknowledgement may be repeated
            await queue.acknowledge(["sample-0"])
        assert queue.depth.num_samples == 1

    run(scenario())


def test_returned_leases_take_their_old_places_and_wake_a_lease(run: Run) -> None:
    async def scenario() -> None:
        queue = make_queue()
        await fill(queue, [3, 5])
        await lease(queue, 2)
        await put(queue, 4)
        async with asyncio.TaskGroup() as tasks:
            leasing = tasks.create_task(lease(queue, 3))
            await settle()
            await queue.return_leases()
        assert ordinals_of(leasing.result()) == [3, 4, 5]

    run(scenario())
