"""How busy a stage is: the time during which at least one of its requests is in flight."""

from collections.abc import Iterator
from contextlib import contextmanager

from opdkit.protocols.messages import StageMeter
from opdkit.protocols.roles import Clock


class StageWatch:
    """Counts a stage's requests and tokens, and measures the union of their intervals."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._num_in_flight = 0
        self._busy_since_s = 0.0
        self._busy_s = 0.0
        self._num_requests = 0
        self._num_prompt_tokens = 0
        self._num_generated_tokens = 0
        self.num_served = 0
        """Requests that ended well."""

    @contextmanager
    def request(self, *, num_prompt_tokens: int) -> Iterator[None]:
        """Cover one request."""
        self._num_requests += 1
        self._num_prompt_tokens += num_prompt_tokens
        if not self._num_in_flight:
            self._busy_since_s = self._clock.now()
        self._num_in_flight += 1
        try:
            yield
            self.num_served += 1
        finally:
            self._num_in_flight -= 1
            if not self._num_in_flight:
                self._busy_s += self._clock.now() - self._busy_since_s

    def add_generated(self, num_tokens: int) -> None:
        """Count tokens as they come."""
        self._num_generated_tokens += num_tokens

    def read(self) -> StageMeter:
        """Return the totals until now, requests in flight included."""
        open_s = self._clock.now() - self._busy_since_s if self._num_in_flight else 0.0
        return StageMeter(
            busy_s=self._busy_s + open_s,
            num_requests=self._num_requests,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generated_tokens=self._num_generated_tokens,
        )
