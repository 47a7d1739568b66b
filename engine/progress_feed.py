"""What a watcher is told: progress records in order, read from wherever the watcher stands."""

import asyncio
from collections.abc import Sequence

from opdkit.protocols.messages import ProgressRecord


class ProgressFeed:
    """All progress records of a run. A reader waits in ``after`` until there is a newer one.

    Nothing is dropped: a run has a few records a step.
    """

    def __init__(self) -> None:
        self._records: list[ProgressRecord] = []
        self._closed = False
        self._changed = asyncio.Condition()

    async def show(self, record: ProgressRecord) -> None:
        """Append a record and wake the readers."""
        async with self._changed:
            self._records.append(record)
            self._changed.notify_all()

    async def after(self, num_seen: int) -> Sequence[ProgressRecord]:
        """Wait for more than ``num_seen`` records; return the new ones, none once all is over."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._closed or len(self._records) > num_seen)
            return self._records[num_seen:]

    async def close(self) -> None:
        """Say that nothing more will come. Idempotent."""
        async with self._changed:
            self._closed = True
            self._changed.notify_all()
