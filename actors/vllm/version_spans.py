"""Which weights the tokens of one chunk of a reply came from."""

from collections.abc import Sequence

from opdkit.protocols.ids import PolicyVersion
from opdkit.protocols.messages import VersionSpan

VersionStarts = Sequence[tuple[str, int]]
"""(weight version, index of the first token of the reply that came from it), in order."""


def spans_between(starts: VersionStarts, first: int, end: int) -> tuple[VersionSpan, ...]:
    """Cut the versions of a reply down to its tokens ``first`` … ``end - 1``."""
    spans: list[VersionSpan] = []
    for index, (version, start) in enumerate(starts):
        next_start = starts[index + 1][1] if index + 1 < len(starts) else end
        num_tokens = min(next_start, end) - max(start, first)
        if num_tokens > 0:
            spans.append(
                VersionSpan(policy_version=PolicyVersion(int(version)), num_tokens=num_tokens)
            )
    return tuple(spans)
