"""The set is exact whatever the order, and small when its members are dense."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from opdkit.engine.ordinal_set import OrdinalSet
from opdkit.protocols.ids import Ordinal


@settings(derandomize=True, deadline=None)
@given(frontier=st.integers(0, 5), ordinals=st.lists(st.integers(0, 25)))
def test_it_agrees_with_a_plain_set(frontier: int, ordinals: list[int]) -> None:
    expected = set(range(frontier))
    runs = OrdinalSet(frontier=frontier)
    for ordinal in ordinals:
        runs.add(Ordinal(ordinal))
        expected.add(ordinal)
    assert [n for n in range(30) if Ordinal(n) in runs] == sorted(expected)
    assert len(runs) == len(expected)
    assert runs.frontier == next(n for n in range(31) if n not in expected)
    assert list(runs.beyond_frontier()) == sorted(n for n in expected if n > runs.frontier)


def test_dense_members_take_one_run() -> None:
    ordinals = list(range(1000))
    random.Random(0).shuffle(ordinals)
    runs = OrdinalSet()
    for ordinal in ordinals:
        runs.add(Ordinal(ordinal))
    assert runs.num_runs == 1
    assert runs.frontier == 1000
