# pyright: basic
"""The one way to call another process: a deadline, a cancellation that arrives, errors of ours.

Ray and Serve let go of a caller that stops waiting, but not of the work: cancelling the task that
awaits an actor, or breaking off a stream, leaves the other side running. So every call goes
through here. ``send`` starts the call and returns Ray's handle of it; it is a function because a
call that Serve turned away must be sent again.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Never

import grpc  # type: ignore[import-untyped]  # publishes no types
import ray
from ray.exceptions import RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
)

from opdkit.protocols.errors import DeadlineExceeded, OpdkitError, ReplicaLost

FIRST_RETRY_S = 0.02
LONGEST_RETRY_S = 1.0
END_OF_STREAM = object()


async def call(send: Callable[[], Any], *, name: str, deadline_s: float) -> Any:
    """Make one call and return its result.

    Args:
        send: starts it: ``lambda: handle.score.remote(data)``, or the same of an actor's method.
        name: what the call is, for messages.
        deadline_s: from now to the result, including the time spent turned away.

    Raises:
        DeadlineExceeded: no result in time; the other side was told to stop.
        ReplicaLost: the other side died, or gave the call up.
        OpdkitError: what the other side raised, as the class it raised. Other exceptions of
            its own arrive in Ray's wrapping.
    """
    deadline = asyncio.get_running_loop().time() + deadline_s
    return await _by(deadline, _admitted(lambda: _result(send(), name)), name, deadline_s)


async def stream(
    send: Callable[[], Any], *, name: str, deadline_s: float
) -> AsyncGenerator[Any, None]:
    """Make one streaming Serve call and yield its items.

    However the caller leaves (``aclose``, cancellation, an exception), the other side is told to
    stop. Close it: ``async with contextlib.aclosing(stream(...))``.

    Args:
        send: starts it: ``lambda: handle.options(stream=True).generate.remote(data)``.
        name: what the call is, for messages.
        deadline_s: from now to the last item.

    Raises:
        As ``call``; items already given stay valid.
    """
    deadline = asyncio.get_running_loop().time() + deadline_s
    items: Any = None

    async def first_item() -> Any:
        nonlocal items
        items = send()
        return await _item(items, name)

    is_over = False
    try:
        # The deadline is set around each wait, not around the yields, where other code runs.
        item = await _by(deadline, _admitted(first_item), name, deadline_s)
        while item is not END_OF_STREAM:
            yield item
            item = await _by(deadline, _item(items, name), name, deadline_s)
        is_over = True
    finally:
        if items is not None and not is_over:
            items.cancel()


async def _by(deadline: float, waiting: Awaitable[Any], name: str, deadline_s: float) -> Any:
    timeout = asyncio.timeout_at(deadline)
    try:
        async with timeout:
            return await waiting
    except TimeoutError as error:
        if timeout.expired():
            raise DeadlineExceeded(f"{name} had no answer within {deadline_s:g} s") from error
        raise


async def _admitted(attempt: Callable[[], Awaitable[Any]]) -> Any:
    """Repeat an attempt that Serve turns away because its line is full.

    Serve has no event for a place in the line, so the wait is timed: what the refusal asks for,
    or twice the wait before.
    """
    wait_s = FIRST_RETRY_S
    while True:
        try:
            return await attempt()
        except BackPressureError as error:
            await asyncio.sleep(error.retry_after_s or wait_s)
            wait_s = min(2 * wait_s, LONGEST_RETRY_S)


async def _item(items: Any, name: str) -> Any:
    try:
        return await anext(items, END_OF_STREAM)
    except asyncio.CancelledError as error:
        _raise_unless_ours(error, name)
    except (RayError, ReplicaUnavailableError, DeploymentUnavailableError, grpc.RpcError) as error:
        _raise_translated(error, name)


async def _result(response: Any, name: str) -> Any:
    try:
        return await response
    except asyncio.CancelledError as error:
        _cancel(response)
        _raise_unless_ours(error, name)
    except (RayError, ReplicaUnavailableError, DeploymentUnavailableError, grpc.RpcError) as error:
        _raise_translated(error, name)


def _cancel(response: Any) -> None:
    if isinstance(response, ray.ObjectRef):
        ray.cancel(response)
    else:
        response.cancel()


def _raise_unless_ours(error: asyncio.CancelledError, name: str) -> Never:
    """Tell our own cancellation from that of the call by the other side: Serve raises the same."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise error
    raise ReplicaLost(f"{name}: the other side cancelled the call") from error


def _raise_translated(error: Exception, name: str) -> Never:
    if isinstance(error, BackPressureError):
        raise error
    if isinstance(error, RayTaskError) and not isinstance(error, TaskCancelledError):
        cause = error.cause
        # As itself, not as Ray's subclass of it; the remote traceback stays as its cause.
        raise cause if isinstance(cause, OpdkitError | BackPressureError) else error from error
    if isinstance(error, grpc.RpcError) and error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
        raise error  # a message over the limit fails everywhere: a bug, not a loss
    # Of an actor's death Ray says more than a screen holds, below its first line.
    [reason, *_] = str(error).splitlines() or [""]
    raise ReplicaLost(f"{name}: {type(error).__name__}: {reason}") from error
