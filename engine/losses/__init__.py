"""Divergences between teacher and student, vocabulary-parallel, with exact gradients."""

from opdkit.engine.losses.divergences import PositionLosses, position_losses
from opdkit.engine.losses.reduction import position_weights
from opdkit.engine.losses.scores import check_scores
from opdkit.engine.losses.vocabulary import token_logprobs

__all__ = [
    "PositionLosses",
    "check_scores",
    "position_losses",
    "position_weights",
    "token_logprobs",
]
