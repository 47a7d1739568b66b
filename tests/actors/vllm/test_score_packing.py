"""The teacher's scores, packed from what vLLM returns for a prompt."""

import numpy as np
import numpy.typing as npt
import pytest

from opdkit.actors.vllm.score_packing import PromptLogprobs, pack_scores, tail_mass
from opdkit.protocols.errors import NonFiniteScoresError, TeacherAlignmentError
from opdkit.protocols.messages import ScoreRequest

IDS = [3, 0, 4, 1, 5]
POSITIONS = [1, 2, 4]
WIDTH = 6

Floats = npt.NDArray[np.float32]


def log_softmax(logits: Floats) -> Floats:
    wide = logits.astype(np.float64)
    result: Floats = (wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))).astype(np.float32)
    return result


def as_vllm_does(rows: Floats, num_best: int) -> PromptLogprobs:
    """Put the actual next token first, then the best ones in order."""
    best = np.argsort(-rows, axis=1, kind="stable")[:, :num_best]
    actual = np.asarray(IDS[1:])[:, None]
    token_ids = np.concatenate([actual, best], axis=1).astype(np.int32)
    return PromptLogprobs(token_ids=token_ids, logprobs=np.take_along_axis(rows, token_ids, axis=1))


@pytest.fixture
def rows() -> Floats:
    """[T-1, W] log-probabilities."""
    logits = np.random.default_rng(0).normal(scale=3.0, size=(len(IDS) - 1, WIDTH))
    return log_softmax(logits.astype(np.float32))


def request(positions: list[int] = POSITIONS) -> ScoreRequest:
    return ScoreRequest(
        sample_id="s7",
        token_ids=np.asarray(IDS, "<i4").tobytes(),
        positions=np.asarray(positions, "<i4").tobytes(),
    )


def floats(data: bytes, *shape: int) -> Floats:
    return np.frombuffer(data, "<f4").reshape(shape)


def test_the_best_k_travel_with_the_sampled_token_and_the_tail(rows: Floats) -> None:
    scores = pack_scores(request(), as_vllm_does(rows, 2), vocab_size=WIDTH, top_k=2)
    wanted = rows[[0, 1, 3]]
    assert (scores.num_positions, scores.support_size) == (3, 2)
    best = np.argsort(-wanted, axis=1, kind="stable")[:, :2]
    np.testing.assert_array_equal(np.frombuffer(scores.token_ids, "<i4").reshape(3, 2), best)
    np.testing.assert_array_equal(
        floats(scores.logprobs, 3, 2), np.take_along_axis(wanted, best, axis=1)
    )
    np.testing.assert_array_equal(floats(scores.sampled_logprobs, 3), wanted[[0, 1, 2], [0, 4, 5]])
    np.testing.assert_allclose(
        floats(scores.tail_mass, 3), 1 - np.exp(floats(scores.logprobs, 3, 2)).sum(1), atol=1e-6
    )


def test_the_full_vocabulary_comes_in_id_order_without_ids(rows: Floats) -> None:
    scores = pack_scores(request(), as_vllm_does(rows, WIDTH), vocab_size=WIDTH, top_k=None)
    assert scores.token_ids == b""
    np.testing.assert_array_equal(floats(scores.logprobs, 3, WIDTH), rows[[0, 1, 3]])
    np.testing.assert_allclose(floats(scores.tail_mass, 3), 0, atol=1e-6)


def test_padding_columns_carry_no_probability_in_the_full_vocabulary() -> None:
    logits = np.random.default_rng(1).normal(size=(len(IDS) - 1, WIDTH + 3)).astype(np.float32)
    prompt = as_vllm_does(log_softmax(logits), WIDTH + 3)
    scores = pack_scores(request(), prompt, vocab_size=WIDTH, top_k=None)
    expected = log_softmax(logits[[0, 1, 3], :WIDTH])
    np.testing.assert_allclose(floats(scores.logprobs, 3, WIDTH), expected, atol=1e-6)
    sampled = expected[[0, 1, 2], [0, 4, 5]]
    np.testing.assert_allclose(floats(scores.sampled_logprobs, 3), sampled, atol=1e-6)


def test_padding_ids_among_the_best_become_unused_ids_of_probability_zero() -> None:
    logits = np.zeros((len(IDS) - 1, WIDTH + 2), np.float32)
    logits[:, [WIDTH, 0, WIDTH + 1, 2]] = [9.0, 8.0, 7.0, 6.0]
    prompt = as_vllm_does(log_softmax(logits), 4)
    scores = pack_scores(request(), prompt, vocab_size=WIDTH, top_k=4)
    token_ids = np.frombuffer(scores.token_ids, "<i4").reshape(3, 4)
    np.testing.assert_array_equal(token_ids, [[1, 0, 3, 2]] * 3)
    assert np.isneginf(floats(scores.logprobs, 3, 4)[:, [0, 2]]).all()
    assert np.isfinite(floats(scores.logprobs, 3, 4)[:, [1, 3]]).all()


def test_other_ids_than_were_sent_are_rejected(rows: Floats) -> None:
    prompt = as_vllm_does(rows, 2)
    prompt.token_ids[2, 0] += 1
    with pytest.raises(TeacherAlignmentError, match="s7: id 2 was scored at position 3, but 1"):
        pack_scores(request(), prompt, vocab_size=WIDTH, top_k=2)


def test_an_extra_row_is_rejected(rows: Floats) -> None:
    prompt = as_vllm_does(rows, 2)
    longer = PromptLogprobs(
        token_ids=np.concatenate([prompt.token_ids, prompt.token_ids[-1:]]),
        logprobs=np.concatenate([prompt.logprobs, prompt.logprobs[-1:]]),
    )
    with pytest.raises(TeacherAlignmentError, match="5 ids were sent, but 5 were scored"):
        pack_scores(request(), longer, vocab_size=WIDTH, top_k=2)


@pytest.mark.parametrize("positions", [[0, 1], [2, 2], [3, 2], [4, 5], [-1]])
def test_positions_that_predict_nothing_are_rejected(rows: Floats, positions: list[int]) -> None:
    with pytest.raises(TeacherAlignmentError, match="must increase within 1 … 4"):
        pack_scores(request(positions), as_vllm_does(rows, 2), vocab_size=WIDTH, top_k=2)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_scores_that_are_no_numbers_are_rejected(rows: Floats, value: float) -> None:
    prompt = as_vllm_does(rows, 2)
    prompt.logprobs[1, 2] = value
    with pytest.raises(NonFiniteScoresError, match=r"s7: 1 of .* at position 2"):
        pack_scores(request(), prompt, vocab_size=WIDTH, top_k=2)


def test_bad_numbers_elsewhere_and_probabilities_of_zero_do_no_harm(rows: Floats) -> None:
    prompt = as_vllm_does(rows, 2)
    prompt.logprobs[2, 1] = np.nan  # row 2 predicts position 3, which is not asked for
    prompt.logprobs[1, 2] = -np.inf
    scores = pack_scores(request(), prompt, vocab_size=WIDTH, top_k=2)
    assert np.isneginf(floats(scores.logprobs, 3, 2)[1, 1])


def test_no_positions_give_empty_scores(rows: Floats) -> None:
    scores = pack_scores(request([]), as_vllm_does(rows, 2), vocab_size=WIDTH, top_k=2)
    assert (scores.num_positions, scores.support_size, scores.logprobs) == (0, 2, b"")


def test_the_tail_is_exact_at_its_ends() -> None:
    with np.errstate(divide="ignore"):
        logprobs = np.log([[1 - 1e-6, 0.0], [0.0, 0.0], [1.0, 0.0], [0.25, 0.25]])
    tail = tail_mass(logprobs.astype(np.float32))
    np.testing.assert_allclose(tail, [1e-6, 1.0, 0.0, 0.5], rtol=0.1)
