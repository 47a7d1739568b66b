"""Cutting the versions of a reply down to one chunk."""

import pytest

from opdkit.actors.vllm.version_spans import spans_between


@pytest.mark.parametrize(
    ("first", "end", "expected"),
    [
        (0, 4, [(0, 4)]),
        (0, 10, [(0, 10)]),
        (8, 12, [(0, 2), (1, 2)]),
        (10, 12, [(1, 2)]),
        (9, 31, [(0, 1), (1, 20), (2, 1)]),
        (40, 41, [(2, 1)]),
        (7, 7, []),
    ],
)
def test_spans_cover_the_chunk(first: int, end: int, expected: list[tuple[int, int]]) -> None:
    spans = spans_between([("0", 0), ("1", 10), ("2", 30)], first, end)
    assert [(span.policy_version, span.num_tokens) for span in spans] == expected


def test_a_version_that_made_no_token_is_left_out() -> None:
    spans = spans_between([("0", 0), ("1", 5), ("2", 5)], 0, 8)
    assert [(span.policy_version, span.num_tokens) for span in spans] == [(0, 5), (2, 3)]
