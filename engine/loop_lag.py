"""How late the event loop runs what is due: the sign of something that blocks it."""

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

INTERVAL_S = 0.05
NUM_KEPT = 2000
"""Measurements kept: the last 100 s."""


class LoopLag:
    """Measures, while watched, how far behind its time a timer of the running loop fires."""

    def __init__(self, *, interval_s: float = INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._lags_s: deque[float] = deque(maxlen=NUM_KEPT)
        self._num_watching = 0
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Measure meanwhile; the last one to leave stops the timer."""
        self._num_watching += 1
        if self._timer is None:
            self._set_timer()
        try:
            yield
        finally:
            self._num_watching -= 1
            if not self._num_watching and self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def p99_s(self) -> float:
        """Return the lag that one measurement in a hundred exceeds, in seconds."""
        ordered = sorted(self._lags_s)
        return ordered[int(0.99 * (len(ordered) - 1))] if ordered else 0.0

    def _set_timer(self) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time() + self._interval_s
        self._timer = loop.call_at(due_s, self._measure, loop, due_s)

    def _measure(self, loop: asyncio.AbstractEventLoop, due_s: float) -> None:
        self._lags_s.append(max(0.0, loop.time() - due_s))
        self._set_timer()
