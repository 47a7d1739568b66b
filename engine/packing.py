"""Who trains on which segment: a batch split over data-parallel ranks and into micro-batches.

A rank takes whole samples, so that a payload travels once. All ranks run the same number of
micro-batches, since each one is a round of collectives. That number comes first: the least for
which the samples, longest first, all find room. Each goes to the rank with the fewest tokens
that has room for it (longest processing time: R. L. Graham, "Bounds on multiprocessing timing
anomalies", 1969), there to the first micro-batches that have.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from opdkit.protocols.messages import SampleMeta, SegmentRef, StepPlan

Microbatches = tuple[tuple[SegmentRef, ...], ...]


def plan_step(
    metas: Sequence[SampleMeta], *, step: int, data_parallel_size: int, microbatch_tokens: int
) -> StepPlan:
    """Plan one optimizer step over these samples. The same input gives the same plan.

    Ranks that get less than others are filled up with empty micro-batches.

    Raises:
        ValueError: a segment is longer than ``microbatch_tokens``; the message names it.
    """
    if data_parallel_size < 1:
        raise ValueError(f"data_parallel_size must be at least 1, got {data_parallel_size}")
    samples = [_segment_refs(meta, microbatch_tokens) for meta in metas]
    segments = [ref for refs in samples for ref in refs]
    return StepPlan(
        step=step,
        microbatches=_split(samples, data_parallel_size, microbatch_tokens),
        num_supervised=sum(ref.num_supervised for ref in segments),
        num_sequences=sum(ref.num_supervised > 0 for ref in segments),
    )


def _segment_refs(meta: SampleMeta, microbatch_tokens: int) -> list[SegmentRef]:
    for index, shape in enumerate(meta.segments):
        if shape.num_tokens > microbatch_tokens:
            raise ValueError(
                f"segment {index} of sample {meta.sample_id!r} has {shape.num_tokens} tokens, "
                f"but microbatch_tokens is {microbatch_tokens}"
            )
    return [
        SegmentRef(
            sample_id=meta.sample_id,
            index=index,
            num_tokens=shape.num_tokens,
            num_supervised=shape.num_supervised,
        )
        for index, shape in enumerate(meta.segments)
    ]


def _num_tokens(refs: Sequence[SegmentRef]) -> int:
    return sum(ref.num_tokens for ref in refs)


def _split(
    samples: Sequence[list[SegmentRef]], data_parallel_size: int, microbatch_tokens: int
) -> tuple[Microbatches, ...]:
    longest_first = sorted(samples, key=_num_tokens, reverse=True)
    num_tokens = sum(map(_num_tokens, samples))
    # One micro-batch a segment always suffices.
    for num_microbatches in count(
        max(1, -(-num_tokens // (data_parallel_size * microbatch_tokens)))
    ):
        ranks = [
            _Rank.empty(num_microbatches, microbatch_tokens) for _ in range(data_parallel_size)
        ]
        if all(_place(sample, ranks) for sample in longest_first):
            break
    return tuple(tuple(map(tuple, rank.microbatches)) for rank in ranks)


@dataclass(slots=True, kw_only=True)
class _Rank:
    """Micro-batches being filled, and the tokens for which each has room."""

    microbatches: list[list[SegmentRef]]
    room: list[int]
    num_tokens: int = 0

    @classmethod
    def empty(cls, num_microbatches: int, microbatch_tokens: int) -> "_Rank":
        return cls(
            microbatches=[[] for _ in range(num_microbatches)],
            room=[microbatch_tokens] * num_microbatches,
        )

    def take(self, sample: list[SegmentRef]) -> bool:
        """Put every segment into the first micro-batch with room, or else change nothing."""
        room = self.room.copy()
        chosen: list[int] = []
        longest_first = sorted(sample, key=lambda ref: ref.num_tokens, reverse=True)
        for ref in longest_first:
            index = next((i for i, free in enumerate(room) if free >= ref.num_tokens), None)
            if index is None:
                return False
            room[index] -= ref.num_tokens
            chosen.append(index)
        for ref, index in zip(longest_first, chosen, strict=True):
            self.microbatches[index].append(ref)
        self.room = room
        self.num_tokens += _num_tokens(sample)
        return True


def _place(sample: list[SegmentRef], ranks: Sequence[_Rank]) -> bool:
    """Give a sample to the least loaded rank that can take it; say whether one could."""
    return any(rank.take(sample) for rank in sorted(ranks, key=lambda rank: rank.num_tokens))
