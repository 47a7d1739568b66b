"""Borrowing from a bounded amount."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from opdkit.engine.credits import Credits

Run = Callable[[Coroutine[Any, Any, Any]], Any]


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_a_total_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="total is 0"):
        Credits(0)


def test_what_is_lent_never_exceeds_the_total(run: Run) -> None:
    async def scenario() -> None:
        credits_ = Credits(10)
        lent = 0
        most = 0

        async def borrow(amount: int) -> None:
            nonlocal lent, most
            async with credits_.borrow(amount):
                lent += amount
                most = max(most, lent)
                await settle()
                lent -= amount

        async with asyncio.TaskGroup() as group:
            for amount in (4, 4, 4, 9, 1, 10, 2):
                group.create_task(borrow(amount))
        assert most <= 10
        assert credits_.free == 10

    run(scenario())


def test_more_than_the_total_runs_alone(run: Run) -> None:
    async def scenario() -> None:
        credits_ = Credits(10)
        async with credits_.borrow(1000):
            assert credits_.free == 0
        assert credits_.free == 10

    run(scenario())


def test_nobody_overtakes_a_large_borrower(run: Run) -> None:
    async def scenario() -> None:
        credits_ = Credits(10)
        order: list[str] = []

        async def borrow(name: str, amount: int) -> None:
            async with credits_.borrow(amount):
                order.append(name)

        async with asyncio.TaskGroup() as group, credits_.borrow(5):
            group.create_task(borrow("large", 8))
            await settle()
            group.create_task(borrow("small", 1))
            await settle()
            assert order == []
        assert order == ["large", "small"]

    run(scenario())


def test_a_cancelled_wait_lets_the_next_one_in(run: Run) -> None:
    async def scenario() -> None:
        credits_ = Credits(10)
        order: list[str] = []

        async def borrow(name: str, amount: int) -> None:
            async with credits_.borrow(amount):
                order.append(name)

        async with asyncio.TaskGroup() as group, credits_.borrow(5):
            large = group.create_task(borrow("large", 8))
            await settle()
            group.create_task(borrow("small", 1))
            await settle()
            large.cancel()
            await settle()
            assert order == ["small"]
        assert credits_.free == 10

    run(scenario())


def test_a_borrower_cancelled_at_its_turn_gives_back(run: Run) -> None:
    async def scenario() -> None:
        credits_ = Credits(10)

        async def borrow() -> None:
            async with credits_.borrow(8):
                raise AssertionError("it was cancelled before it woke")

        async with asyncio.TaskGroup() as group:
            async with credits_.borrow(5):
                waiting = group.create_task(borrow())
                await settle()
            waiting.cancel()  # its turn has come, but it has not run yet
        assert credits_.free == 10

    run(scenario())
