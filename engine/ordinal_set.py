"""Ordinals that have ended, as runs of consecutive numbers.

Ordinals are drawn in order and end nearly in order, so the runs are few: exact membership of
millions costs memory for the gaps alone.
"""

from bisect import bisect_right
from collections.abc import Iterator

from opdkit.protocols.ids import Ordinal


class OrdinalSet:
    """A set of ordinals from 0 that only grows, stored as disjoint half-open runs."""

    def __init__(self, *, frontier: int = 0) -> None:
        """Start with every ordinal below ``frontier``."""
        self._starts: list[int] = [0] if frontier else []
        self._stops: list[int] = [frontier] if frontier else []

    def __contains__(self, ordinal: Ordinal) -> bool:
        index = bisect_right(self._starts, ordinal) - 1
        return index >= 0 and ordinal < self._stops[index]

    def __len__(self) -> int:
        return sum(stop - start for start, stop in zip(self._starts, self._stops, strict=True))

    @property
    def frontier(self) -> Ordinal:
        """The lowest ordinal that is not inside."""
        starts_at_zero = bool(self._starts) and self._starts[0] == 0
        return Ordinal(self._stops[0] if starts_at_zero else 0)

    @property
    def num_runs(self) -> int:
        """Number of runs stored."""
        return len(self._starts)

    def beyond_frontier(self) -> Iterator[Ordinal]:
        """Iterate over the members above the frontier, in order."""
        first = 1 if self.frontier else 0
        for start, stop in zip(self._starts[first:], self._stops[first:], strict=True):
            yield from map(Ordinal, range(start, stop))

    def add(self, ordinal: Ordinal) -> None:
        """Insert one ordinal; once more changes nothing."""
        if ordinal in self:
            return
        index = bisect_right(self._starts, ordinal)
        extends_left = index > 0 and self._stops[index - 1] == ordinal
        extends_right = index < len(self._starts) and self._starts[index] == ordinal + 1
        if extends_left and extends_right:
            self._stops[index - 1] = self._stops.pop(index)
            del self._starts[index]
        elif extends_left:
            self._stops[index - 1] += 1
        elif extends_right:
            self._starts[index] -= 1
        else:
            self._starts.insert(index, ordinal)
            self._stops.insert(index, ordinal + 1)
