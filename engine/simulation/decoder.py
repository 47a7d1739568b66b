"""A replica that decodes several sequences at once, in virtual time.

All active sequences advance together, one token a step, and a step takes
``step_s + sequence_s * n`` with n sequences active: ``sequence_s`` 0 is a decoder of fixed speed,
``step_s`` is the time to read the weights, ``sequence_s`` that to read one sequence's keys and
values. Nothing happens for a single token: progress, counted in steps, is one number that all
sequences share, and the only timer is that of the sequence that ends next.
"""

import asyncio
import heapq
import math
from dataclasses import dataclass, field

from opdkit.protocols.ids import PolicyVersion
from opdkit.protocols.messages import VersionSpan

ROUNDING = 1e-6
"""Steps by which progress may fall short of a sequence's end when its timer fires."""


@dataclass(order=True)
class _Sequence:
    end: float
    """Progress at which its last token is done."""
    serial: int
    done: asyncio.Future[None] = field(compare=False)


class SharedDecoder:
    """Up to ``max_active`` sequences at once; others wait in line."""

    def __init__(self, *, step_s: float, sequence_s: float, max_active: int) -> None:
        self._step_s = step_s
        self._sequence_s = sequence_s
        self._progress = 0.0
        self._counted_s = 0.0
        """The loop's time up to which progress is counted."""
        self._active: list[_Sequence] = []
        self._seats = asyncio.Semaphore(max_active)
        self.num_requests = 0
        """Sequences active or in line."""
        self._num_started = 0
        self._is_still = True
        """No weights yet, or new ones on their way in."""
        self._versions: list[tuple[float, PolicyVersion]] = []
        """Progress from which each version made the tokens."""
        self._timer: asyncio.TimerHandle | None = None

    async def decode(self, num_tokens: int) -> tuple[VersionSpan, ...]:
        """Decode so many tokens, and return which weights made them."""
        self.num_requests += 1
        try:
            async with self._seats:
                return await self._decode(num_tokens)
        finally:
            self.num_requests -= 1

    async def stand_still(self, seconds: float, version: PolicyVersion) -> None:
        """Make no token for so long; afterwards the tokens are of ``version``."""
        self._count()
        self._is_still = True
        self._set_timer()
        await asyncio.sleep(seconds)
        self._counted_s = _now_s()
        self._is_still = False
        self._versions.append((self._progress, version))
        self._set_timer()

    async def _decode(self, num_tokens: int) -> tuple[VersionSpan, ...]:
        self._count()
        start = self._progress
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        sequence = _Sequence(start + num_tokens, self._num_started, done)
        self._num_started += 1
        heapq.heappush(self._active, sequence)
        self._set_timer()
        try:
            await done
        finally:
            if sequence in self._active:  # cancelled
                self._count()
                self._active.remove(sequence)
                heapq.heapify(self._active)
                self._set_timer()
        return self._spans(start, num_tokens)

    def _count(self) -> None:
        """Bring progress up to now."""
        now_s = _now_s()
        if not self._is_still and self._active:
            self._progress += (now_s - self._counted_s) / self._seconds_per_step()
        self._counted_s = now_s

    def _seconds_per_step(self) -> float:
        return self._step_s + self._sequence_s * len(self._active)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._active and not self._is_still:
            steps = max(0.0, self._active[0].end - self._progress)
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(steps * self._seconds_per_step(), self._end_sequences)

    def _end_sequences(self) -> None:
        self._count()
        # The timer is the end, whatever the clock's rounding made of the time between.
        self._progress = max(self._progress, self._active[0].end)
        while self._active and self._active[0].end <= self._progress + ROUNDING:
            heapq.heappop(self._active).done.set_result(None)
        self._set_timer()

    def _spans(self, start: float, num_tokens: int) -> tuple[VersionSpan, ...]:
        """Cut the tokens start + 1 … start + num_tokens where the versions changed."""
        spans: list[VersionSpan] = []
        bounds = [*(begin for begin, _ in self._versions[1:]), math.inf]
        num_before = 0
        for (_, version), until in zip(self._versions, bounds, strict=True):
            num_until = num_tokens if until == math.inf else math.floor(until - start + ROUNDING)
            num_until = min(max(num_until, num_before), num_tokens)
            if num_until > num_before:
                count = num_until - num_before
                spans.append(VersionSpan(policy_version=version, num_tokens=count))
            num_before = num_until
        return tuple(spans)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
