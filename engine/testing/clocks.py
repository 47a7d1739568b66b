"""Clocks that a test controls."""

import asyncio


class FakeClock:
    """Stands still until it is moved."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def now(self) -> float:
        """Return the time that was set."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move on."""
        self._now_s += seconds


class LoopClock:
    """The running loop's time; on a ``VirtualTimeLoop`` it costs nothing to wait for."""

    def now(self) -> float:
        """Return the loop's time."""
        return asyncio.get_running_loop().time()
