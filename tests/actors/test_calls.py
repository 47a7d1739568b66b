# pyright: basic
"""Calls to a Serve deployment and to a plain actor: deadlines, cancellation, errors."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from typing import Any

import pytest
import ray
from ray import serve

from opdkit.actors.calls import call, stream
from opdkit.protocols.errors import DeadlineExceeded, PromptError, ReplicaLost
from tests.actors.conftest import RunReal

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]

DEADLINE_S = 30.0


class Worker:
    """Does what a test asks, and knows how often it was told to stop."""

    def __init__(self) -> None:
        self._stopped = asyncio.Event()
        self._num_running = 0

    async def echo(self, value: bytes) -> bytes:
        """Return what came."""
        return value

    async def fail(self) -> None:
        """Raise one of our errors."""
        raise PromptError("row 7 has no messages")

    async def hang(self) -> None:
        """Wait until cancelled."""
        self._num_running += 1
        try:
            await asyncio.Event().wait()
        finally:
            self._stopped.set()

    async def until_stopped(self) -> bool:
        """Wait until a call was cancelled."""
        await self._stopped.wait()
        self._stopped.clear()
        return True

    async def nap(self) -> None:
        """Take a place for a moment."""
        await asyncio.sleep(0.05)

    async def numbers(self) -> AsyncGenerator[int, None]:
        """Yield three numbers, then wait until cancelled."""
        try:
            for number in range(3):
                yield number
            await asyncio.Event().wait()
        finally:
            self._stopped.set()

    async def three(self) -> AsyncGenerator[int, None]:
        """Yield three numbers."""
        for number in range(3):
            yield number

    async def die(self) -> None:
        """End the process."""
        import os

        os._exit(1)


@pytest.fixture(scope="module")
def handle(cluster: None, run_real: RunReal) -> Iterator[Any]:
    serve.start(proxy_location="Disabled")
    deployment: Any = serve.deployment(
        Worker, name="worker", ray_actor_options={"num_cpus": 0.1}, graceful_shutdown_timeout_s=0.1
    )

    async def start() -> Any:
        return await asyncio.to_thread(
            lambda: serve.run(deployment.bind(), name="calls", route_prefix=None)
        )

    yield run_real(start())
    serve.delete("calls")


@pytest.fixture(scope="module")
def actor(cluster: None) -> Any:
    return ray.remote(Worker).options(num_cpus=0.1).remote()


@pytest.fixture(params=["handle", "actor"])
def other(request: pytest.FixtureRequest) -> Any:
    """The other side of a call: a Serve handle or an actor."""
    return request.getfixturevalue(request.param)


def to(other: Any, method: str, *arguments: Any, deadline_s: float = DEADLINE_S) -> Any:
    return call(
        lambda: getattr(other, method).remote(*arguments), name="the call", deadline_s=deadline_s
    )


def test_a_result_arrives(other: Any, run_real: RunReal) -> None:
    assert run_real(to(other, "echo", b"abc")) == b"abc"


def test_our_errors_arrive_as_themselves(other: Any, run_real: RunReal) -> None:
    with pytest.raises(PromptError, match="row 7") as caught:
        run_real(to(other, "fail"))
    assert type(caught.value) is PromptError


def test_at_the_deadline_the_other_side_is_stopped(other: Any, run_real: RunReal) -> None:
    with pytest.raises(DeadlineExceeded, match=r"the call had no answer within 0\.5 s"):
        run_real(to(other, "hang", deadline_s=0.5))
    assert run_real(to(other, "until_stopped"))


def test_cancellation_reaches_the_other_side(other: Any, run_real: RunReal) -> None:
    async def cancel() -> bool:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(to(other, "hang"))
            await to(other, "echo", b"")
            await to(other, "echo", b"")
            task.cancel()
        assert task.cancelled()
        return bool(await to(other, "until_stopped"))

    assert run_real(cancel())


def test_a_stream_yields_its_items_and_ends(handle: Any, run_real: RunReal) -> None:
    async def read() -> list[int]:
        streaming = handle.options(stream=True)
        items = stream(lambda: streaming.three.remote(), name="three", deadline_s=DEADLINE_S)
        async with aclosing(items):
            return [item async for item in items]

    assert run_real(read()) == [0, 1, 2]


def test_leaving_a_stream_stops_the_other_side(handle: Any, run_real: RunReal) -> None:
    async def leave(after: Callable[[Any], Any], deadline_s: float) -> bool:
        streaming = handle.options(stream=True)
        items = stream(lambda: streaming.numbers.remote(), name="numbers", deadline_s=deadline_s)
        async with aclosing(items):
            await after(items)
        return bool(await to(handle, "until_stopped"))

    async def read_one(items: Any) -> None:
        await anext(items)

    async def read_past_the_deadline(items: Any) -> None:
        with pytest.raises(DeadlineExceeded, match="numbers"):
            async for _ in items:
                pass

    assert run_real(leave(read_one, DEADLINE_S))
    assert run_real(leave(read_past_the_deadline, 1.0))


def test_calls_turned_away_are_sent_again(cluster: None, run_real: RunReal) -> None:
    deployment: Any = serve.deployment(
        Worker,
        name="narrow",
        max_ongoing_requests=1,
        max_queued_requests=1,
        ray_actor_options={"num_cpus": 0.1},
        graceful_shutdown_timeout_s=0.1,
    )

    async def deploy() -> Any:
        return await asyncio.to_thread(
            lambda: serve.run(deployment.bind(), name="narrow", route_prefix=None)
        )

    async def crowd(handle: Any) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(5):
                group.create_task(to(handle, "nap"))

    run_real(crowd(run_real(deploy())))
    serve.delete("narrow")


def test_death_is_a_loss(other: Any, run_real: RunReal) -> None:
    """The last test of both."""
    with pytest.raises(ReplicaLost, match="the call"):
        run_real(to(other, "die"))
