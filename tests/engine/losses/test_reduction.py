# mypy: disable-error-code=no-untyped-call
# pyright: basic
# torch annotates its tensors in part.
"""The loss of a global batch does not depend on how the batch is split."""

from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opdkit.engine.losses import position_weights
from opdkit.protocols.config import LossSection
from tests.engine.losses.reference import evaluate, random_case

Normalize = Literal["token", "sequence"]
NORMALIZATIONS: tuple[Normalize, ...] = ("token", "sequence")


def normalised_loss(
    counts: list[int], losses: torch.Tensor, *, normalize: Normalize, microbatches: list[list[int]]
) -> float:
    """Sum weight · loss over micro-batches, each a list of indices of sequences."""
    pieces = losses.split(counts)
    num_supervised, num_sequences = sum(counts), sum(count > 0 for count in counts)
    total = 0.0
    for microbatch in microbatches:
        weights = position_weights(
            [counts[index] for index in microbatch],
            normalize=normalize,
            num_supervised=num_supervised,
            num_sequences=num_sequences,
        )
        here = torch.cat([pieces[index] for index in microbatch] or [losses[:0]])
        total += (weights * here).sum().item()
    return total


@settings(derandomize=True, deadline=None, max_examples=60, database=None)
@given(counts=st.lists(st.integers(0, 9), min_size=1, max_size=12), data=st.data())
def test_any_split_gives_the_loss_of_the_whole_batch(
    counts: list[int], data: st.DataObject
) -> None:
    losses = torch.rand(sum(counts), generator=torch.Generator().manual_seed(0))
    order = data.draw(st.permutations(range(len(counts))))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(counts)), max_size=4)))
    microbatches = [
        order[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(counts)], strict=True)
    ]
    means = [piece.mean().item() for piece in losses.split(counts) if len(piece)]
    expected = {
        "token": losses.mean().item() if len(losses) else 0.0,
        "sequence": sum(means) / len(means) if means else 0.0,
    }
    for normalize in NORMALIZATIONS:
        found = normalised_loss(counts, losses, normalize=normalize, microbatches=microbatches)
        assert found == pytest.approx(expected[normalize], abs=1e-6)


def test_a_split_gives_the_gradient_of_the_whole_batch_too() -> None:
    # Completions of 3 and 7 tokens and an empty one, reverse KL.
    counts = [3, 0, 7]
    case = random_case(LossSection(), num_positions=10)
    assert case.ids_PK is not None
    for normalize in NORMALIZATIONS:
        gradients: list[torch.Tensor] = []
        for microbatches in ([[0, 1, 2]], [[0], [1], [2]], [[0, 1], [2]]):
            logits_PV = case.logits_PV.detach().clone().requires_grad_()
            start = 0
            for microbatch in microbatches:
                here = [counts[index] for index in microbatch]
                rows = slice(start, start + sum(here))
                part = case._replace(
                    logits_PV=logits_PV[rows],
                    ids_PK=case.ids_PK[rows],
                    logprobs_PK=case.logprobs_PK[rows],
                )
                weights = position_weights(
                    here, normalize=normalize, num_supervised=10, num_sequences=2
                )
                torch.autograd.backward((evaluate(part).losses_P * weights).sum())
                start = rows.stop
            assert logits_PV.grad is not None
            gradients.append(logits_PV.grad)
        for gradient in gradients[1:]:
            torch.testing.assert_close(gradient, gradients[0])


def test_weights_are_those_of_the_global_batch() -> None:
    token = position_weights([1, 3], normalize="token", num_supervised=8, num_sequences=4)
    assert token.tolist() == [0.125] * 4
    sequence = position_weights([1, 0, 4], normalize="sequence", num_supervised=8, num_sequences=4)
    assert sequence.tolist() == [0.25] + [0.0625] * 4


@pytest.mark.parametrize("normalize", NORMALIZATIONS)
def test_a_batch_that_counts_nothing_has_weight_0(normalize: Normalize) -> None:
    empty = position_weights([0, 0], normalize=normalize, num_supervised=0, num_sequences=0)
    assert empty.shape == (0,)
    filler = position_weights([2], normalize=normalize, num_supervised=0, num_sequences=0)
    assert filler.tolist() == [0.0, 0.0]
    assert position_weights([], normalize=normalize, num_supervised=5, num_sequences=2).shape == (
        0,
    )
