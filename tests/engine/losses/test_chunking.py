# mypy: disable-error-code=no-untyped-call
# pyright: basic
# torch does not annotate backward.
"""What the way of computing must not change, and what it must save."""

import pytest
import torch

from opdkit.benchmarks.storage_meter import StorageMeter
from opdkit.protocols.config import LossSection
from tests.engine.losses.reference import LOSSES, evaluate, name_of, random_case, weighted_gradient

each_loss = pytest.mark.parametrize("loss", LOSSES, ids=name_of)


@each_loss
def test_chunks_change_nothing(loss: LossSection) -> None:
    case = random_case(loss)
    whole = evaluate(case)
    for chunk_cells in (1, 26, 50):
        parts = evaluate(case, chunk_cells=chunk_cells)
        for part, one in zip(parts, whole, strict=True):
            torch.testing.assert_close(part, one, atol=1e-14, rtol=1e-14)
        torch.testing.assert_close(
            weighted_gradient(parts.losses_P, case.logits_PV),
            weighted_gradient(evaluate(case).losses_P, case.logits_PV),
            atol=1e-14,
            rtol=1e-14,
        )


def test_a_second_backward_pass_is_refused_instead_of_wrong() -> None:
    losses_P = evaluate(random_case(LossSection())).losses_P
    losses_P.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses_P.sum().backward()


def test_the_teacher_and_the_reported_values_carry_no_gradient() -> None:
    case = random_case(LossSection(support="full"))
    case.logprobs_PK.requires_grad_()
    result = evaluate(case)
    result.losses_P.sum().backward()
    assert case.logprobs_PK.grad is None
    assert not result.student_mass_P.requires_grad
    with torch.no_grad():
        assert not evaluate(case).losses_P.requires_grad


@each_loss
def test_memory_is_one_gradient_and_a_few_chunks(loss: LossSection) -> None:
    chunk_cells, num_positions, width = 1024, 64, 512
    case = random_case(
        loss, num_positions=num_positions, num_vocab=500, width=width, dtype=torch.float32
    )
    case = case._replace(logprobs_PK=case.logprobs_PK.float())
    with StorageMeter(case.logits_PV, case.ids_PK, case.logprobs_PK) as meter:
        evaluate(case, chunk_cells=chunk_cells).losses_P.sum().backward()
    gradient_bytes, chunk_bytes = 4 * num_positions * width, 4 * chunk_cells
    per_position_bytes = 64 * num_positions
    assert gradient_bytes < meter.peak_bytes
    assert meter.peak_bytes < gradient_bytes + 8 * chunk_bytes + per_position_bytes
