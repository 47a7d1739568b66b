"""What the two kinds of support share: what is asked of a chunk of positions, and its answer."""

from typing import Literal, NamedTuple

from torch import Tensor

from opdkit.engine.losses.vocabulary import VocabularyShard

TAIL_FLOOR = 1e-7
"""Least teacher probability, under the reverse KL, of the tokens outside the teacher's support.

float32 log-probabilities that add up to 1 cannot tell a smaller one from none, and none would
make KL(Q‖P) infinite. The other divergences are finite there and have no floor.
"""


class Objective(NamedTuple):
    """The loss and the vocabulary it is taken over."""

    beta: float
    """0 forward KL, 1 reverse KL, between them JSD."""
    temperature: float
    tail: Literal["bucket", "renormalize"]
    """Only for a top-k support."""
    shard: VocabularyShard


class ChunkLosses(NamedTuple):
    """Losses of C positions. Where ``covered`` is false, loss, mass and gradient are 0."""

    losses_C: Tensor
    """Nats."""
    covered_C: Tensor
    student_mass_C: Tensor
    gradient_CV: Tensor | None
    """d loss / d logits of this rank's real columns; None if it was not asked for."""


def without_uncovered(
    losses_C: Tensor, covered_C: Tensor, student_mass_C: Tensor, gradient_CV: Tensor | None
) -> ChunkLosses:
    """Zero, in place, what belongs to positions without a teacher."""
    uncovered_C = ~covered_C
    if gradient_CV is not None:
        gradient_CV.masked_fill_(uncovered_C[:, None], 0.0)
    return ChunkLosses(
        losses_C.masked_fill_(uncovered_C, 0.0),
        covered_C,
        student_mass_C.masked_fill_(uncovered_C, 0.0),
        gradient_CV,
    )
