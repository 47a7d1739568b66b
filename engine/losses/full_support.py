"""Divergences over the whole shared vocabulary."""

import math

import torch
from torch import Tensor

from opdkit.engine.losses.chunks import TAIL_FLOOR, ChunkLosses, Objective, without_uncovered
from opdkit.engine.losses.outcomes import OutcomeTerms, outcome_terms
from opdkit.engine.losses.vocabulary import log_sum_exp, sum_over_ranks, working_dtype


def full_losses(
    logits_CV: Tensor, teacher_CV: Tensor, objective: Objective, *, needs_gradient: bool
) -> ChunkLosses:
    """Compare both models over the real columns of all ranks.

    The teacher is renormalised over them. A column where it is -inf has probability 0; for the
    reverse KL all such columns are one outcome of probability ``TAIL_FLOOR``.

    Args:
        logits_CV: the student's, this rank's real columns.
        teacher_CV: the teacher's log-probabilities of the same ids, at temperature 1.
        objective: the loss.
        needs_gradient: form the gradient too.
    """
    log_p_CV, log_q_CV, covered_C = _distributions(logits_CV, teacher_CV, objective)
    terms = outcome_terms(log_p_CV, log_q_CV, beta=objective.beta)
    excluded_CV = _excluded(log_p_CV)
    if excluded_CV is not None and objective.beta == 1.0:
        terms.loss.masked_fill_(excluded_CV, 0.0)
        terms.slope.masked_fill_(excluded_CV, 0.0)
    sums = torch.stack((terms.loss.sum(-1), terms.slope.sum(-1), _mass(terms, excluded_CV)))
    losses_C, mean_slope_C, excluded_mass_C = sum_over_ranks(sums, objective.shard.group)
    if objective.beta == 1.0:
        excluded = _excluded_terms(excluded_mass_C)
        losses_C.add_(excluded.loss)
        mean_slope_C.add_(excluded.slope)
        if excluded_CV is not None:
            share_C = excluded.slope / excluded_mass_C.clamp_min(torch.finfo(losses_C.dtype).tiny)
            terms.slope.add_((terms.student * share_C[:, None]).masked_fill_(~excluded_CV, 0.0))

    gradient_CV = None
    if needs_gradient:
        expected_CV = terms.student.mul_(mean_slope_C[:, None])
        gradient_CV = terms.slope.sub_(expected_CV).div_(objective.temperature)
    return without_uncovered(losses_C, covered_C, 1.0 - excluded_mass_C, gradient_CV)


def _distributions(
    logits_CV: Tensor, teacher_CV: Tensor, objective: Objective
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-probabilities of teacher and student, and which rows have a teacher."""
    log_q_CV, log_p_CV = (
        values.to(working_dtype(logits_CV), copy=True).div_(objective.temperature)
        for values in (logits_CV, teacher_CV)
    )
    normaliser = log_sum_exp((log_q_CV, log_p_CV), objective.shard.group)
    covered_C = normaliser.top[1] > -math.inf
    for part in normaliser:
        part[1].masked_fill_(~covered_C, 0.0)
        log_q_CV.sub_(part[0][:, None])
        log_p_CV.sub_(part[1][:, None])
    return log_p_CV, log_q_CV, covered_C


def _excluded(log_p_CV: Tensor) -> Tensor | None:
    """Return where the teacher is impossible; None if nowhere, which spares a third of the time."""
    if log_p_CV.numel() == 0 or log_p_CV.amin() > -math.inf:
        return None
    return log_p_CV == -math.inf


def _mass(terms: OutcomeTerms, where_CV: Tensor | None) -> Tensor:
    if where_CV is None:
        return terms.student.new_zeros(terms.student.shape[0])
    return terms.student.masked_fill(~where_CV, 0.0).sum(-1)


def _excluded_terms(excluded_mass_C: Tensor) -> OutcomeTerms:
    """Return the terms of all excluded tokens as one outcome, where the student gives them mass."""
    log_floor_C = torch.full_like(excluded_mass_C, math.log(TAIL_FLOOR))
    terms = outcome_terms(log_floor_C, excluded_mass_C.log(), beta=1.0)
    terms.loss.masked_fill_(excluded_mass_C == 0, 0.0)
    return terms
