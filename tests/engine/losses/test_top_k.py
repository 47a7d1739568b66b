# mypy: disable-error-code=no-untyped-call
# pyright: basic
# torch annotates neither backward nor the optimizers.
"""What becomes of the mass outside the teacher's k tokens."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch

from opdkit.protocols.config import LossSection
from tests.engine.losses.reference import Case, evaluate, random_case


def test_a_top_k_that_covers_the_vocabulary_is_the_full_support() -> None:
    for divergence in ("forward_kl", "reverse_kl"):
        top = LossSection(divergence=divergence, tail="bucket")
        full = LossSection(divergence=divergence, support="full")
        torch.testing.assert_close(
            evaluate(random_case(top, k=11)).losses_P, evaluate(random_case(full)).losses_P
        )


def test_a_teacher_whose_rounded_probabilities_exceed_one_is_still_a_distribution() -> None:
    for divergence in ("forward_kl", "reverse_kl"):
        loss = LossSection(divergence=divergence)
        logits_PV = torch.tensor([[20.0, 20.0, 0.0]])
        logprobs_PK = torch.tensor([[math.log(0.5), math.log(0.5)]]) + 2e-3
        case = Case(logits_PV, torch.tensor([[0, 1]]), logprobs_PK, loss, 3)
        assert evaluate(case).losses_P.abs() < 1e-6


def masses_while_optimising(loss: LossSection) -> list[float]:
    """Return the student's mass on the teacher's tokens before each of 50 steps."""
    case = random_case(loss, num_positions=16, num_vocab=60, width=64, k=8, scale=2.0)
    optimizer = torch.optim.SGD([case.logits_PV], lr=3.0)
    masses = []
    for _ in range(50):
        result = evaluate(case)
        masses.append(result.student_mass_P.mean().item())
        optimizer.zero_grad()
        result.losses_P.sum().backward()
        optimizer.step()
    return masses


@pytest.mark.parametrize(("divergence", "beta"), [("reverse_kl", None), ("jsd", 0.5)])
def test_optimising_with_the_bucket_raises_the_mass_on_the_teachers_tokens(
    divergence: Any, beta: float | None
) -> None:
    # verl#5041: without the tail these losses are minimised by emptying the support.
    masses = masses_while_optimising(LossSection(divergence=divergence, beta=beta, tail="bucket"))
    assert all(later > earlier for earlier, later in pairwise(masses))
    assert masses[-1] > 2 * masses[0]

    loss = LossSection(divergence=divergence, beta=beta, tail="renormalize")
    assert masses_while_optimising(loss)[-1] < masses[0]
