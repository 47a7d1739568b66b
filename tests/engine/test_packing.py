"""Every segment is trained once, within the budget, on ranks that do the same number of rounds."""

import random
from collections import Counter
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opdkit.engine.packing import plan_step
from opdkit.engine.testing_messages import make_meta
from opdkit.protocols.messages import SampleMeta, SegmentRef, StepPlan

BUDGET = 100

Batch = list[list[int]]
"""Token counts of the segments of each sample."""


def metas_of(batch: Batch) -> list[SampleMeta]:
    return [
        make_meta(ordinal, segments=[(n, n // 2) for n in lengths])
        for ordinal, lengths in enumerate(batch)
    ]


def plan(batch: Batch, *, ranks: int, budget: int = BUDGET) -> StepPlan:
    return plan_step(metas_of(batch), step=7, data_parallel_size=ranks, microbatch_tokens=budget)


def segments_of(step_plan: StepPlan) -> list[list[SegmentRef]]:
    return [[ref for refs in rank for ref in refs] for rank in step_plan.microbatches]


def loads_of(step_plan: StepPlan) -> list[int]:
    return [sum(ref.num_tokens for ref in refs) for refs in segments_of(step_plan)]


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    batch=st.lists(st.lists(st.integers(1, BUDGET), max_size=4), max_size=12),
    ranks=st.integers(1, 8),
)
def test_any_batch_is_split_over_any_number_of_ranks(batch: Batch, ranks: int) -> None:
    step_plan = plan(batch, ranks=ranks)
    by_rank = segments_of(step_plan)
    assert len(by_rank) == ranks
    assert len({len(rank) for rank in step_plan.microbatches}) == 1
    packed = Counter((ref.sample_id, ref.index, ref.num_tokens) for refs in by_rank for ref in refs)
    assert packed == Counter(
        (f"sample-{ordinal}", index, n)
        for ordinal, lengths in enumerate(batch)
        for index, n in enumerate(lengths)
    )
    for rank in step_plan.microbatches:
        assert all(sum(ref.num_tokens for ref in refs) <= BUDGET for refs in rank)
    homes = Counter(sample_id for refs in by_rank for sample_id in {r.sample_id for r in refs})
    assert set(homes.values()) <= {1}, "a sample is on two ranks"


@settings(derandomize=True, deadline=None)
@given(
    batch=st.lists(st.lists(st.integers(1, BUDGET), max_size=4), max_size=12),
    ranks=st.integers(1, 8),
)
def test_the_totals_do_not_depend_on_the_split(batch: Batch, ranks: int) -> None:
    step_plan = plan(batch, ranks=ranks)
    supervised = [n // 2 for lengths in batch for n in lengths]
    assert step_plan.step == 7
    assert step_plan.num_supervised == sum(supervised)
    assert step_plan.num_sequences == sum(n > 0 for n in supervised)
    assert step_plan == plan(batch, ranks=ranks)


def lognormal(count: int, *, longest: int) -> Batch:
    rng = random.Random(count)
    return [[min(longest, max(1, int(rng.lognormvariate(4.0, 0.8))))] for _ in range(count)]


@pytest.mark.parametrize(
    ("batch", "ranks", "budget", "extra_microbatches", "most_tokens_ratio"),
    [
        pytest.param([[50]] * 7, 2, 100, 0, 8 / 7, id="7 rows over 2 ranks"),
        pytest.param([[10]] * 5, 4, 100, 0, 20 / 13, id="5 samples on 4 ranks"),
        pytest.param([[10]], 4, 100, 0, 1.0, id="1 sample on 4 ranks"),
        pytest.param([], 4, 100, 0, 1.0, id="nothing on 4 ranks"),
        pytest.param([[60], [60], [40], [40]], 1, 100, 0, 1.0, id="pairs that fill up"),
        pytest.param([[60, 40]] * 4, 2, 100, 0, 1.0, id="two segments a sample"),
        pytest.param([[100], *[[10]] * 10], 2, 100, 0, 1.0, id="one long, ten short"),
        pytest.param([[7], [6], [5], [4], [3]], 2, 100, 0, 14 / 13, id="Graham's greedy"),
        pytest.param([[60]] * 8, 2, 100, 1, 1.0, id="no two in one micro-batch"),
        pytest.param(lognormal(64, longest=500), 1, 512, 0, 1.0, id="64 lognormal, 1 rank"),
        pytest.param(lognormal(64, longest=500), 4, 512, 0, 1.01, id="64 lognormal, 4 ranks"),
        pytest.param(lognormal(256, longest=500), 8, 512, 0, 1.01, id="256 lognormal, 8 ranks"),
    ],
)
def test_the_balance_is_near_its_lower_bound(
    batch: Batch, ranks: int, budget: int, extra_microbatches: int, most_tokens_ratio: float
) -> None:
    lengths = [sum(segments) for segments in batch]
    least_microbatches = max(1, ceil(sum(lengths) / (ranks * budget)))
    least_tokens = max([0, *lengths, ceil(sum(lengths) / ranks)])
    step_plan = plan(batch, ranks=ranks, budget=budget)
    assert len(step_plan.microbatches[0]) <= least_microbatches + extra_microbatches
    assert max(loads_of(step_plan)) <= least_tokens * most_tokens_ratio


def test_a_segment_above_the_budget_is_named() -> None:
    with pytest.raises(
        ValueError,
        match="segment 1 of sample 'sample-1' has 101 tokens, but microbatch_tokens is 100",
    ):
        plan([[100], [3, 101]], ranks=2)


def test_no_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="data_parallel_size must be at least 1, got 0"):
        plan([[1]], ranks=0)
