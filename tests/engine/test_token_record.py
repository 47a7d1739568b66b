"""Masks, log-probabilities and versions stay with the tokens that they belong to."""

from array import array

import pytest

from opdkit.engine.reply import Reply
from opdkit.engine.token_record import TokenSequence
from opdkit.protocols.errors import HookError
from opdkit.protocols.ids import PolicyVersion
from opdkit.protocols.messages import TokenChunk, VersionSpan

PROMPT = [7, 8]


def span(version: int, num_tokens: int) -> VersionSpan:
    return VersionSpan(policy_version=PolicyVersion(version), num_tokens=num_tokens)


def make_reply(*token_ids: int, versions: tuple[VersionSpan, ...] = ()) -> Reply:
    reply = Reply()
    reply.add(
        TokenChunk(
            token_ids=array("i", token_ids).tobytes(),
            logprobs=array("f", [-float(token) for token in token_ids]).tobytes(),
            spans=versions or (span(0, len(token_ids)),),
            finish_reason="stop",
        )
    )
    return reply


def make_sequence(*token_ids: int, versions: tuple[VersionSpan, ...] = ()) -> TokenSequence:
    sequence = TokenSequence(PROMPT)
    sequence.add_reply(make_reply(*token_ids, versions=versions), in_turn=False)
    return sequence


def floats(data: bytes) -> list[float]:
    return list(array("f", data))


def test_a_segment_marks_the_sampled_tokens_and_keeps_their_versions() -> None:
    sequence = make_sequence(1, 2, versions=(span(3, 1), span(4, 1)))
    sequence.insert([50], in_turn=False)
    sequence.add_reply(make_reply(5, versions=(span(4, 1),)), in_turn=False)
    segment = sequence.segment()
    assert memoryview(segment.token_ids).cast("i").tolist() == [7, 8, 1, 2, 50, 5]
    assert list(segment.loss_mask) == [0, 0, 1, 1, 0, 1]
    assert floats(segment.sampler_logprobs) == [0, 0, -1, -2, 0, -5]
    assert segment.spans == (span(3, 1), span(4, 2))


def test_an_insertion_between_turns_is_in_no_turns_lists() -> None:
    sequence = make_sequence(1)
    sequence.insert([50], in_turn=False)
    sequence.add_reply(make_reply(5), in_turn=False)
    assert [ids for ids, _, _ in sequence.turns()] == [[1], [5]]


def test_an_insertion_within_a_turn_is_in_its_lists_with_mask_0() -> None:
    sequence = make_sequence(1)
    sequence.insert([50], in_turn=True)
    sequence.add_reply(make_reply(5), in_turn=True)
    assert list(sequence.turns()) == [([1, 50, 5], [1, 0, 1], [-1.0, -5.0])]


def test_a_rewrite_touches_the_last_reply_only() -> None:
    sequence = make_sequence(1, 2)
    sequence.add_reply(make_reply(3), in_turn=True)
    assert sequence.rewrite_reply([3, 90], [1, 0], None) == 0
    assert list(sequence.turns()) == [([1, 2, 3, 90], [1, 1, 1, 0], [-1.0, -2.0, -3.0])]


def test_masking_sampled_tokens_takes_them_out_of_the_versions() -> None:
    sequence = make_sequence(1, 2, 3, versions=(span(5, 2), span(6, 1)))
    sequence.rewrite_reply([1, 2, 3], [0, 1, 1], None)
    assert sequence.segment().spans == (span(5, 1), span(6, 1))


def test_a_token_put_in_by_a_scheduler_has_the_oldest_version_and_no_logprob() -> None:
    sequence = make_sequence(1, 2, versions=(span(5, 1), span(6, 1)))
    assert sequence.rewrite_reply([1, 66], None, None) == 1
    segment = sequence.segment()
    assert segment.spans == (span(5, 2),)
    assert segment.sampler_logprobs == b""


def test_logprobs_of_a_scheduler_win() -> None:
    sequence = make_sequence(1, 2)
    sequence.rewrite_reply([1, 90, 2], [1, 0, 1], [-0.5, -0.25])
    assert floats(sequence.segment().sampler_logprobs)[2:] == [-0.5, 0.0, -0.25]


def test_logprobs_without_ids_belong_to_the_recorded_ones() -> None:
    sequence = make_sequence(1, 2)
    sequence.rewrite_reply(None, None, [-0.5, -0.25])
    assert list(sequence.turns()) == [([1, 2], [1, 1], [-0.5, -0.25])]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_logprobs_of_another_count_than_the_mask_are_dropped(count: int) -> None:
    sequence = make_sequence(1, 2)
    sequence.rewrite_reply([1, 2], None, [-0.5] * count)
    assert not sequence.has_logprobs
    assert sequence.segment().sampler_logprobs == b""


@pytest.mark.parametrize(
    ("token_ids", "mask", "words"),
    [
        ([1, 2], [1], "1 values for 2 response_token_ids"),
        (None, [1], "1 values, but there are 0 response_token_ids"),
        ([1, 2], [1, 2], r"holds \[2\], not 0 or 1"),
        ([1, 2**40], None, "no 32-bit integers"),
    ],
)
def test_a_rewrite_that_does_not_fit_is_refused_and_changes_nothing(
    token_ids: list[int] | None, mask: list[int] | None, words: str
) -> None:
    sequence = make_sequence(1, 2)
    before = sequence.segment()
    with pytest.raises(HookError, match=words):
        sequence.rewrite_reply(token_ids, mask, None)
    assert sequence.segment() == before
