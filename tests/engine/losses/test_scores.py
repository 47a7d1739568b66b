"""Scores that no loss may use are refused by name."""

import math

import pytest
import torch
from torch import Tensor

from opdkit.engine.losses import check_scores
from opdkit.protocols.errors import NonFiniteScoresError, SampleError, TeacherAlignmentError

IDS = torch.tensor([[3, 1, 0], [2, 5, 4]], dtype=torch.int32)


def logprobs() -> Tensor:
    return torch.tensor([[0.5, 0.2, 0.1], [0.9, 0.04, 0.01]]).log()


def test_sound_scores_pass() -> None:
    check_scores(logprobs(), teacher_ids_PK=IDS, num_vocab=6)
    check_scores(logprobs(), teacher_ids_PK=None, num_vocab=3)


def test_no_scores_pass() -> None:
    check_scores(torch.empty(0, 3), teacher_ids_PK=IDS[:0], num_vocab=6)
    check_scores(torch.empty(2, 0), teacher_ids_PK=IDS[:, :0], num_vocab=6)
    check_scores(torch.full((2, 3), -math.inf), teacher_ids_PK=IDS, num_vocab=6)


def test_an_absent_entry_may_have_any_id() -> None:
    scores, ids = logprobs(), IDS.clone()
    scores[0, 1:] = -math.inf
    ids[0] = torch.tensor([3, 3, 99])
    check_scores(scores, teacher_ids_PK=ids, num_vocab=6)
    scores[1, 2] = -math.inf
    ids[1, 2] = -1
    check_scores(scores, teacher_ids_PK=ids, num_vocab=6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("ids", [IDS, None])
def test_a_score_that_is_no_number_is_refused(bad: float, ids: Tensor | None) -> None:
    scores = logprobs()
    scores[1, 2] = bad
    with pytest.raises(NonFiniteScoresError, match=rf"{bad} at supervised position 1, entry 2"):
        check_scores(scores, teacher_ids_PK=ids, num_vocab=6)


@pytest.mark.parametrize("bad", [6, -1])
def test_an_id_outside_the_vocabulary_is_refused(bad: int) -> None:
    ids = IDS.clone()
    ids[1, 1] = bad
    with pytest.raises(TeacherAlignmentError, match=rf"id {bad} at .* position 1, .* ids 0 to 5"):
        check_scores(logprobs(), teacher_ids_PK=ids, num_vocab=6)


def test_the_same_id_twice_is_refused() -> None:
    ids = IDS.clone()
    ids[0, 2] = 3
    with pytest.raises(TeacherAlignmentError, match="id 3 twice at supervised position 0"):
        check_scores(logprobs(), teacher_ids_PK=ids, num_vocab=6)


def test_probabilities_that_add_up_to_more_than_one_are_refused() -> None:
    scores = logprobs()
    scores[1, 1] = math.log(0.6)
    with pytest.raises(TeacherAlignmentError, match=r"position 1 add up to 1\.51"):
        check_scores(scores, teacher_ids_PK=IDS, num_vocab=6)


def test_ragged_scores_are_refused() -> None:
    with pytest.raises(TeacherAlignmentError, match=r"\(2, 2\).*\(2, 3\)"):
        check_scores(logprobs(), teacher_ids_PK=IDS[:, :2], num_vocab=6)


def test_a_refusal_costs_the_sample_only() -> None:
    assert issubclass(TeacherAlignmentError, SampleError)
    assert issubclass(NonFiniteScoresError, SampleError)
