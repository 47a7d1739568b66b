"""What a teacher's scores must satisfy before a loss may use them."""

import math

import torch
from torch import Tensor

from opdkit.protocols.errors import NonFiniteScoresError, TeacherAlignmentError

MAX_TOTAL_PROBABILITY = 1.01
"""Bound on the sum of a row: 1 and generous rounding."""


def check_scores(
    teacher_logprobs_PK: Tensor, *, teacher_ids_PK: Tensor | None, num_vocab: int
) -> None:
    """Check the scores of one sample, or of several that stand or fall together.

    Entries of -inf are absent: their ids may be anything.

    Args:
        teacher_logprobs_PK: natural logarithms.
        teacher_ids_PK: whose they are; None: column i is id i.
        num_vocab: number of the student's real ids.

    Raises:
        NonFiniteScoresError: NaN or +inf among the log-probabilities.
        TeacherAlignmentError: an id outside [0, num_vocab), an id twice in a row, a row of
            probabilities that add up to more than 1, or as many ids as log-probabilities are not.
    """
    if teacher_ids_PK is not None and teacher_ids_PK.shape != teacher_logprobs_PK.shape:
        raise TeacherAlignmentError(
            f"teacher ids have shape {tuple(teacher_ids_PK.shape)}, "
            f"log-probabilities {tuple(teacher_logprobs_PK.shape)}"
        )
    if teacher_logprobs_PK.numel() == 0:
        return
    _check_finite(teacher_logprobs_PK)
    if teacher_ids_PK is not None:
        is_present_PK = teacher_logprobs_PK > -math.inf
        _check_range(teacher_ids_PK, is_present_PK, num_vocab)
        _check_distinct(teacher_ids_PK, is_present_PK)
        _check_total(teacher_logprobs_PK)


def _check_finite(logprobs_PK: Tensor) -> None:
    # The maximum of anything and NaN is NaN: one pass, no mask as large as a full vocabulary.
    if logprobs_PK.amax() < math.inf:
        return
    for position, logprobs_K in enumerate(logprobs_PK):
        is_bad_K = ~(logprobs_K < math.inf)
        if is_bad_K.any():
            column = int(is_bad_K.nonzero()[0])
            raise NonFiniteScoresError(
                f"teacher log-probability {float(logprobs_K[column])} at supervised position "
                f"{position}, entry {column}: must be finite or -inf"
            )


def _check_range(ids_PK: Tensor, is_present_PK: Tensor, num_vocab: int) -> None:
    is_outside_PK = is_present_PK & ((ids_PK < 0) | (ids_PK >= num_vocab))
    if is_outside_PK.any():
        position, column = is_outside_PK.nonzero()[0].tolist()
        raise TeacherAlignmentError(
            f"teacher id {int(ids_PK[position, column])} at supervised position {position}, "
            f"but the student's vocabulary has ids 0 to {num_vocab - 1}"
        )


def _check_distinct(ids_PK: Tensor, is_present_PK: Tensor) -> None:
    absent_K = -1 - torch.arange(ids_PK.shape[1], device=ids_PK.device, dtype=ids_PK.dtype)
    sorted_PK = ids_PK.where(is_present_PK, absent_K).sort(-1).values
    is_repeated = sorted_PK[:, 1:] == sorted_PK[:, :-1]
    if is_repeated.any():
        position, column = is_repeated.nonzero()[0].tolist()
        raise TeacherAlignmentError(
            f"teacher id {int(sorted_PK[position, column])} twice at supervised position {position}"
        )


def _check_total(logprobs_PK: Tensor) -> None:
    total_P = logprobs_PK.exp().sum(-1)
    if total_P.amax() > MAX_TOTAL_PROBABILITY:
        position = int(total_P.argmax())
        raise TeacherAlignmentError(
            f"teacher probabilities at supervised position {position} add up to "
            f"{float(total_P[position]):.4g}, but must not exceed 1"
        )
