"""A bounded amount that callers borrow from, first come, first served.

A borrower waits in line for its share; giving back hands shares to the head of the line for as
long as they fit. Nobody overtakes, so a large borrower is not starved by small ones. Giving back
never waits, so that a borrower that is cancelled gives back all the same.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Credits:
    """Shares ``total`` among its borrowers; the sum of what is lent never exceeds it."""

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"total is {total}, but must be at least 1")
        self._total = total
        self._free = total
        self._line: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def free(self) -> int:
        """What is not lent now."""
        return self._free

    @asynccontextmanager
    async def borrow(self, amount: int) -> AsyncIterator[None]:
        """Hold ``amount`` within the block; more than the total means all of it, alone."""
        share = min(amount, self._total)
        await self._take(share)
        try:
            yield
        finally:
            self._give(share)

    async def _take(self, share: int) -> None:
        if not self._line and share <= self._free:
            self._free -= share
            return
        turn = asyncio.get_running_loop().create_future()
        place = (share, turn)
        self._line.append(place)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._line.remove(place)
                self._hand_out()
            else:  # cancelled between its turn and its waking
                self._give(share)
            raise

    def _give(self, share: int) -> None:
        self._free += share
        self._hand_out()

    def _hand_out(self) -> None:
        while self._line and self._line[0][0] <= self._free:
            share, turn = self._line.popleft()
            self._free -= share
            turn.set_result(None)
