"""Divergences over the teacher's k best tokens at each position."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from opdkit.engine.losses.chunks import TAIL_FLOOR, ChunkLosses, Objective, without_uncovered
from opdkit.engine.losses.outcomes import outcome_terms
from opdkit.engine.losses.vocabulary import log_sum_exp, sum_over_ranks, working_dtype


class _Student(NamedTuple):
    """The student over the K tokens that this rank holds, and over all others together."""

    slot_CK: Tensor
    """Column of each of the teacher's tokens; the spare last column where it is not here."""
    is_here_CK: Tensor
    log_q_CK: Tensor
    """-inf where the token is not here."""
    log_q_tail_C: Tensor
    mass_C: Tensor
    """Probability of the K tokens."""
    within_tail: Tensor
    """[C, V + 1]: log-probability of each token given that it is in the tail; -inf for the K."""


def top_k_losses(
    logits_CV: Tensor,
    ids_CK: Tensor,
    logprobs_CK: Tensor,
    objective: Objective,
    *,
    needs_gradient: bool,
) -> ChunkLosses:
    """Compare both models over the teacher's tokens.

    Args:
        logits_CV: the student's, this rank's real columns.
        ids_CK: the teacher's tokens, each once in a row. Those of probability -inf are ignored.
        logprobs_CK: the teacher's log-probabilities of them at temperature 1.
        objective: the loss. With tail ``bucket`` everything else is one more outcome on both
            sides; with ``renormalize`` both sides are renormalised over the K.
        needs_gradient: form the gradient too.
    """
    covered_C = (logprobs_CK > -math.inf).any(-1)
    student = _student(logits_CV, ids_CK.where(logprobs_CK > -math.inf, -1), objective)
    log_p_CK, log_p_tail_C = _teacher(logprobs_CK, student.log_q_tail_C > -math.inf, objective)
    log_p_CK = log_p_CK.to(student.log_q_CK.dtype).masked_fill_(~student.is_here_CK, -math.inf)

    inside = outcome_terms(log_p_CK, student.log_q_CK, beta=objective.beta)
    tail = outcome_terms(log_p_tail_C.to(log_p_CK.dtype), student.log_q_tail_C, beta=objective.beta)
    sums = torch.stack((inside.loss.sum(-1), inside.slope.sum(-1)))
    losses_C, mean_slope_C = sum_over_ranks(sums, objective.shard.group)
    losses_C.add_(tail.loss)
    mean_slope_C.add_(tail.slope)

    gradient_CV = None
    if needs_gradient:
        tail_C = tail.slope - tail.student * mean_slope_C
        gradient = student.within_tail.exp_().mul_(tail_C[:, None])
        gradient.scatter_(1, student.slot_CK, inside.slope - inside.student * mean_slope_C[:, None])
        gradient_CV = gradient[:, :-1].div_(objective.temperature)
    return without_uncovered(losses_C, covered_C, student.mass_C, gradient_CV)


def _student(logits_CV: Tensor, ids_CK: Tensor, objective: Objective) -> _Student:
    num_rows, num_columns = logits_CV.shape
    column_CK = ids_CK.long() - objective.shard.first_id
    is_here_CK = (ids_CK >= 0) & (column_CK >= 0) & (column_CK < num_columns)
    slot_CK = column_CK.where(is_here_CK, num_columns)
    rest = logits_CV.new_empty((num_rows, num_columns + 1), dtype=working_dtype(logits_CV))
    rest[:, :-1].copy_(logits_CV).div_(objective.temperature)
    rest[:, -1] = -math.inf
    chosen_CK = rest.gather(1, slot_CK)
    rest.scatter_(1, slot_CK, -math.inf)

    # The tail is summed over its own columns: 1 - Σ would lose it to rounding.
    top, log_sum = log_sum_exp((chosen_CK, rest), objective.shard.group)
    row_top_C = top.amax(0)
    inside_C, outside_C = (top - row_top_C) + log_sum
    everything_C = torch.logaddexp(inside_C, outside_C)
    has_bucket = objective.tail == "bucket"
    normaliser_C = everything_C if has_bucket else inside_C
    log_q_tail_C = outside_C - everything_C if has_bucket else torch.full_like(outside_C, -math.inf)
    for part_C in (top[1], log_sum[1]):
        rest.sub_(part_C.masked_fill(part_C == -math.inf, 0.0)[:, None])
    return _Student(
        slot_CK=slot_CK,
        is_here_CK=is_here_CK,
        log_q_CK=chosen_CK.sub_(row_top_C[:, None]).sub_(normaliser_C[:, None]),
        log_q_tail_C=log_q_tail_C,
        mass_C=(inside_C - everything_C).exp_(),
        within_tail=rest,
    )


def _teacher(
    logprobs_CK: Tensor, has_tail_C: Tensor, objective: Objective
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of the K tokens and of the tail that add up to 1, in float64.

    log(1 - Σ) comes from expm1 of log Σ, in float64: exact for the log-probabilities given.
    Rounding may bring Σ above 1: then the tail is 0, or ``TAIL_FLOOR`` for the reverse KL. Where
    the student has no token outside the K there is no tail.
    """
    log_p_CK = logprobs_CK.double() / objective.temperature
    inside_C = log_p_CK.logsumexp(-1)
    floor = TAIL_FLOOR if objective.beta == 1.0 else 0.0
    log_tail_C = (
        inside_C.expm1().neg_().clamp_min_(floor).log_().masked_fill_(~has_tail_C, -math.inf)
    )
    total_C = torch.logaddexp(inside_C, log_tail_C)
    return log_p_CK - total_C[:, None], log_tail_C - total_C
