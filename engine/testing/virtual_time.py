"""An event loop on which waiting takes no time.

When nothing is ready, its clock jumps to the next timer. Schedules of minutes run in milliseconds
and always alike. Work for the default executor is done at once, in place, in no time; a plain hook
still gets a thread, but the clock does not wait for it: use hooks that are ``async def``.
"""

import asyncio
import selectors
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar, TypeVarTuple

T = TypeVar("T")
Args = TypeVarTuple("Args")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Use as ``asyncio.Runner(loop_factory=VirtualTimeLoop)``."""

    def __init__(self) -> None:
        self._selector_of_time = _JumpingSelector()
        super().__init__(self._selector_of_time)

    def time(self) -> float:
        """Return the virtual time, in seconds from 0."""
        return self._selector_of_time.now_s

    def run_in_executor(
        self,
        executor: Executor | None,
        func: Callable[[*Args], T],
        *args: *Args,
    ) -> asyncio.Future[T]:
        """Run the function now."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - raised by whoever awaits it
            future.set_exception(error)
        return future


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            return super().select(None)  # only another thread can wake the loop
        events = super().select(0)
        if not events:
            self.now_s += timeout
        return events
