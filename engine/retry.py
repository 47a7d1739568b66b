"""How much may fail before a run gives up.

Infrastructure and data have budgets of their own: a flaky replica must not use up what is meant
for bad prompts, nor the other way round.
"""

from collections import deque


class Budget:
    """Failures that are repaired: at most ``limit`` within any ``window_s``."""

    def __init__(self, *, limit: int, window_s: float | None = None) -> None:
        """Allow ``limit`` failures; ``window_s`` None: over the whole run."""
        if limit < 0:
            raise ValueError(f"limit must be at least 0, got {limit}")
        if window_s is not None and window_s <= 0:
            raise ValueError(f"window_s must be above 0, got {window_s}")
        self._limit = limit
        self._window_s = window_s
        self._spent_s: deque[float] = deque(maxlen=limit + 1)

    def spend(self, *, now_s: float) -> bool:
        """Count one failure; say whether it is within the budget."""
        self._spent_s.append(now_s)
        if self._window_s is not None:
            while self._spent_s[0] <= now_s - self._window_s:
                self._spent_s.popleft()
        return len(self._spent_s) <= self._limit


def are_too_many_dead(
    *, num_dead: int, num_drawn: int, max_dead_fraction: float, min_drawn: int
) -> bool:
    """Say whether the data, not chance, must be at fault.

    Args:
        num_dead: samples given up.
        num_drawn: samples drawn, those still alive included.
        max_dead_fraction: share of the drawn ones that may die.
        min_drawn: below it no share means anything.
    """
    return num_drawn >= min_drawn and num_dead > max_dead_fraction * num_drawn
