"""The weights that turn losses of positions into the loss of a global batch."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor


def position_weights(
    num_supervised_per_sequence: Sequence[int],
    *,
    normalize: Literal["token", "sequence"],
    num_supervised: int,
    num_sequences: int,
) -> Tensor:
    """Weight the positions of some sequences of a global batch.

    Σ weight · loss over all positions of the batch, however it is split, is its loss: for
    ``token`` the mean over its supervised positions, for ``sequence`` the mean over its sequences
    of each one's mean.

    Args:
        num_supervised_per_sequence: supervised positions of each sequence here, in order.
        normalize: as ``loss.normalize``.
        num_supervised: supervised positions of the whole global batch.
        num_sequences: sequences with a supervised position in the whole global batch.

    Returns:
        [P] float32, P the sum of ``num_supervised_per_sequence``. Where the batch counts nothing,
        weights are 0.
    """
    counts = torch.tensor(num_supervised_per_sequence, dtype=torch.int64)
    if normalize == "token":
        denominators = torch.full_like(counts, num_supervised)
    else:
        denominators = counts * num_sequences
    weights = denominators.double().reciprocal().masked_fill(denominators == 0, 0.0)
    return weights.float().repeat_interleave(counts)
