"""Short calls of a sample queue, for its tests."""

import asyncio
from collections.abc import Coroutine, Iterable

import pytest

from opdkit.engine.sample_queue import LeaseQueue
from opdkit.engine.testing.clocks import FakeClock
from opdkit.engine.testing_messages import make_meta
from opdkit.engine.testing_run import loop_turns
from opdkit.protocols.errors import QueueClosed
from opdkit.protocols.messages import Demand, SampleMeta

settle = loop_turns(8)


def make_queue(*, max_samples: int = 100, max_bytes: int = 1000) -> LeaseQueue:
    return LeaseQueue(max_samples=max_samples, max_bytes=max_bytes, clock=FakeClock())


async def put(queue: LeaseQueue, ordinal: int, *, due: int = 0, num_bytes: int = 1) -> None:
    await queue.put(make_meta(ordinal, due_step=due), bytes([ordinal % 256]) * num_bytes)


async def fill(queue: LeaseQueue, ordinals: Iterable[int], *, due: int = 0) -> None:
    for ordinal in ordinals:
        await put(queue, ordinal, due=due)


async def lease(queue: LeaseQueue, count: int) -> list[SampleMeta]:
    await queue.set_demand(Demand(count=count))
    return await queue.lease()


def ordinals_of(samples: Iterable[SampleMeta]) -> list[int]:
    return [sample.ordinal for sample in samples]


def ids_of(samples: Iterable[SampleMeta]) -> list[str]:
    return [sample.sample_id for sample in samples]


async def cancelled(task: "asyncio.Task[object]") -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def fails_with_closed(call: Coroutine[object, object, object]) -> None:
    with pytest.raises(QueueClosed, match="the sample queue is closed"):
        await call
