"""What one outcome adds to a divergence, and to its derivative.

An outcome is a token, or all tokens outside the teacher's support taken together. Every divergence
here is a sum over outcomes of f(p, q), so with z the logits at the loss temperature, q = softmax(z)
and g = df/dq up to a constant common to all outcomes, dL/dz = q (g - Σ q g). Ranks that share a
vocabulary need of each other only sums over outcomes.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class OutcomeTerms(NamedTuple):
    """Elementwise, shaped as the log-probabilities."""

    loss: Tensor
    """f(p, q), nats."""
    student: Tensor
    """q"""
    slope: Tensor
    """q g"""


def outcome_terms(log_p: Tensor, log_q: Tensor, *, beta: float) -> OutcomeTerms:
    """Evaluate the terms of a divergence between teacher p and student q.

    ``beta`` 0 is KL(p‖q), 1 is KL(q‖p), between them beta KL(p‖m) + (1 - beta) KL(q‖m) with
    m = beta p + (1 - beta) q (Agarwal et al., arXiv 2306.13649, equation 1). The two KLs are summed
    as p log(p/q) - p + q: the same total for distributions, but no term is negative, and a rounding
    error in a normaliser enters only squared. Where p is 0, KL(q‖p) is infinite.
    """
    p, q = log_p.exp(), log_q.exp()
    if beta == 0.0:
        return OutcomeTerms(_cross(p, log_p, log_q).add_(q).sub_(p), q, p.neg_())
    if beta == 1.0:
        slope = _cross(q, log_q, log_p)
        return OutcomeTerms(slope.sub(q).add_(p), q, slope)
    # logaddexp would take ten times as long. Where the mixture underflows, so do its parts.
    log_m = torch.lerp(q, p, beta).clamp_min_(torch.finfo(q.dtype).tiny).log_()
    slope = _cross(q, log_q, log_m).mul_(1.0 - beta)
    return OutcomeTerms(_cross(p, log_p, log_m).mul_(beta).add_(slope), q, slope)


def _cross(weight: Tensor, log_weight: Tensor, log_other: Tensor) -> Tensor:
    """Return weight · (log_weight - log_other), and 0 where the weight is 0."""
    return (log_weight - log_other).mul_(weight).masked_fill_(weight == 0, 0.0)
