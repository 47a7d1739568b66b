"""The clock of the real world; simulated ones are in ``opdkit.engine.testing``."""

import time


class MonotonicClock:
    """Seconds of the machine's monotonic clock."""

    def now(self) -> float:
        """Return the time in seconds."""
        return time.monotonic()
