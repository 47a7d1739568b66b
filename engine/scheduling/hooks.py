"""Calls a scheduler's hooks: on the loop or in a thread, always under a deadline.

The trajectory waits; the hook, or its deadline, wakes it. A hook in a thread cannot be stopped: at
its deadline it is abandoned, its result dropped. The thread is its own, not a pool's, and nobody
joins it, so that a stuck hook neither starves the others nor keeps the process from ending.
"""

import _thread
import asyncio
import contextvars
import inspect
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import contextmanager, suppress
from typing import Any, Literal, NoReturn, TypeVar

from opdkit.engine.scheduling.contract import Scheduler
from opdkit.protocols.errors import HookError, HookTimeout, JobFailed, OpdkitError, SampleError

T = TypeVar("T")

OnTimeout = Literal["error_observation", "drop", "fail_job"]


class HookRunner:
    """The hooks of one scheduler, as plain awaitable calls that raise only our errors."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        timeout_s: float,
        on_timeout: OnTimeout,
        counters: Counter[str],
    ) -> None:
        self._scheduler = scheduler
        self.timeout_s = timeout_s
        self._on_timeout = on_timeout
        self._counters = counters

    @property
    def tells_timeouts(self) -> bool:
        """Whether a hook's deadline becomes an observation for the model."""
        return self._on_timeout == "error_observation"

    async def call(self, name: str, *args: object) -> object:
        """Call the hook and return its result, unchecked.

        Raises:
            HookError: it raised, or was cancelled from within.
            HookTimeout: it did not return by the deadline.
            JobFailed: the same, where the policy is ``fail_job``.
        """
        deadline = asyncio.timeout(self.timeout_s)
        return await self._guard(name, args, deadline, passing=(SampleError, JobFailed))

    async def call_run(self, pause: "Pause", *args: object) -> object:
        """Like ``call``, for ``run``: its clock stands still within ``pause``.

        Raises:
            OpdkitError: also what the engine raised in what ``run`` called.
        """
        if _is_default(self._scheduler, "run"):
            return await self._scheduler.run(*args)  # type: ignore[arg-type]  # as run gets them
        deadline = asyncio.timeout(self.timeout_s)
        pause.attach(deadline, self.timeout_s)
        return await self._guard("run", args, deadline, passing=(OpdkitError,))

    async def _guard(
        self,
        name: str,
        args: tuple[object, ...],
        deadline: asyncio.Timeout,
        *,
        passing: tuple[type[Exception], ...],
    ) -> object:
        task = asyncio.current_task()
        assert task is not None, "hooks are called by trajectories, which are tasks"
        num_cancelled_before = task.cancelling()
        result: object = None
        failure: BaseException | None = None
        try:
            async with deadline:
                result = await self._invoke(name, args)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - users' code
            failure = error
        # A hook may have swallowed a cancellation, or turned it into an error of its own.
        if task.cancelling() > num_cancelled_before:
            raise asyncio.CancelledError from failure
        label = f"{type(self._scheduler).__name__}.{name}"
        if deadline.expired():
            self._raise_timeout(label)
        if failure is None:
            return result
        if isinstance(failure, passing):
            raise failure
        if isinstance(failure, asyncio.CancelledError):
            raise HookError(f"{label} was cancelled from within") from failure
        raise HookError(f"{label} raised {type(failure).__name__}: {failure}") from failure

    async def _invoke(self, name: str, args: tuple[object, ...]) -> object:
        hook = getattr(self._scheduler, name)
        if inspect.iscoroutinefunction(hook):
            return await _in_own_task(hook, *args, name=name)
        if _is_default(self._scheduler, name):
            return hook(*args)  # the defaults do not block, and need no thread
        result = await _in_thread(hook, *args)
        if inspect.isawaitable(result):
            return await _in_own_task(lambda: result, name=name)
        return result

    def _raise_timeout(self, label: str) -> NoReturn:
        self._counters["hook_timeouts"] += 1
        error = HookTimeout(
            f"{label} did not return within rollout.hook_timeout_s, {self.timeout_s:g} s"
        )
        if self._on_timeout == "fail_job":
            raise JobFailed(f"{error}, and rollout.on_hook_timeout is 'fail_job'") from error
        raise error from None


class Pause:
    """Stops the clock of a running hook while the engine works for it."""

    def __init__(self) -> None:
        self._deadline: asyncio.Timeout | None = None
        self._timeout_s = 0.0
        self._depth = 0

    def attach(self, deadline: asyncio.Timeout, timeout_s: float) -> None:
        """Take charge of a deadline that has not been entered yet."""
        self._deadline, self._timeout_s = deadline, timeout_s

    @contextmanager
    def paused(self) -> Generator[None]:
        """Hold the deadline off; afterwards the hook has its full time again."""
        self._depth += 1
        if self._deadline is not None:
            self._deadline.reschedule(None)
        try:
            yield
        finally:
            self._depth -= 1
            if self._deadline is not None and not self._depth:
                now = asyncio.get_running_loop().time()
                self._deadline.reschedule(now + self._timeout_s)


async def finish_despite_cancellation(work: Coroutine[Any, Any, T], *, name: str) -> T:
    """Await work that has a deadline of its own to its end, and only then let go.

    For cleanup that must be complete: the caller's cancellation is raised when the work is done.
    """
    # Not in a TaskGroup: that would cancel the task with its parent. It is always awaited here.
    task = asyncio.get_running_loop().create_task(work, name=name)
    interruption: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError as error:
            interruption = error
    if interruption is not None:
        failure = None if task.cancelled() else task.exception()
        raise interruption from failure
    return task.result()


def _is_default(scheduler: Scheduler, name: str) -> bool:
    return getattr(getattr(scheduler, name), "__func__", None) is vars(Scheduler)[name]


async def _in_own_task(hook: Callable[..., Awaitable[object]], *args: object, name: str) -> object:
    """Await users' code where it cannot spoil the trajectory's own task.

    Before Python 3.13 a TaskGroup that fails while it waits leaves its task marked as cancelled.
    """

    async def settle() -> _Outcome:
        try:
            return _Outcome(result=await hook(*args))
        except Exception as error:  # noqa: BLE001 - handed to the trajectory, which raises it
            return _Outcome(error=error)

    async with asyncio.TaskGroup() as tasks:
        outcome = await tasks.create_task(settle(), name=f"hook {name}")
    return outcome.unwrap()


async def _in_thread(function: Callable[..., object], *args: object) -> object:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_Outcome] = loop.create_future()
    context = contextvars.copy_context()

    def settle(outcome: _Outcome) -> None:
        if not done.done():  # else abandoned
            done.set_result(outcome)

    def work() -> None:
        try:
            outcome = _Outcome(result=context.run(function, *args))
        except BaseException as error:  # noqa: BLE001 - handed to the trajectory, which raises it
            outcome = _Outcome(error=error)
        with suppress(RuntimeError):  # the loop was closed while this hook was stuck
            loop.call_soon_threadsafe(settle, outcome)

    # threading.Thread.start waits until the thread runs: on a busy machine for milliseconds.
    _thread.start_new_thread(work, ())
    return (await done).unwrap()


class _Outcome:
    """A result or an error; a future itself refuses StopIteration, which hooks may raise."""

    def __init__(self, *, result: object = None, error: BaseException | None = None) -> None:
        self._result = result
        self._error = error

    def unwrap(self) -> object:
        if isinstance(self._error, StopIteration | StopAsyncIteration):
            raise RuntimeError(f"hook raised {type(self._error).__name__}") from self._error
        if self._error is not None:
            raise self._error
        return self._result
