"""Counts what an engine is asked for, and how long it had something to do."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from opdkit.protocols.messages import StageMeter


class StageClock:
    """Counters of one engine since its start."""

    def __init__(self) -> None:
        self._busy_s = 0.0
        self._busy_since = 0.0
        self._num_in_flight = 0
        self._num_requests = 0
        self._num_prompt_tokens = 0
        self._num_generated_tokens = 0

    @contextmanager
    def request(self, num_prompt_tokens: int) -> Iterator[None]:
        """Count a request, in flight for as long as the block runs."""
        if self._num_in_flight == 0:
            self._busy_since = perf_counter()
        self._num_in_flight += 1
        self._num_requests += 1
        self._num_prompt_tokens += num_prompt_tokens
        try:
            yield
        finally:
            self._num_in_flight -= 1
            if self._num_in_flight == 0:
                self._busy_s += perf_counter() - self._busy_since

    def add_generated(self, num_tokens: int) -> None:
        """Count tokens of a reply."""
        self._num_generated_tokens += num_tokens

    def read(self) -> StageMeter:
        """Return the counters as they stand."""
        running_s = perf_counter() - self._busy_since if self._num_in_flight else 0.0
        return StageMeter(
            busy_s=self._busy_s + running_s,
            num_requests=self._num_requests,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generated_tokens=self._num_generated_tokens,
        )
