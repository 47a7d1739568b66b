# mypy: disable-error-code=no-untyped-call
# pyright: basic
# torch annotates neither backward nor the optimizers.
"""Values and gradients against the dense reference, on ordinary and on nasty inputs."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from opdkit.protocols.config import LossSection
from opdkit.protocols.errors import ConfigError, NonFiniteScoresError, TeacherAlignmentError
from tests.engine.losses.reference import (
    LOSSES,
    Case,
    evaluate,
    name_of,
    random_case,
    reference,
    weighted_gradient,
)

each_loss = pytest.mark.parametrize("loss", LOSSES, ids=name_of)
MINUS_INF = -math.inf


def assert_equals_reference(case: Case, *, atol: float = 1e-12) -> None:
    losses_P = evaluate(case).losses_P
    gradient_PV = weighted_gradient(losses_P, case.logits_PV)
    expected_P, expected_PV = reference(case)
    assert torch.isfinite(expected_P).all()
    assert torch.isfinite(expected_PV).all()
    torch.testing.assert_close(losses_P.detach().double(), expected_P, atol=atol, rtol=atol)
    torch.testing.assert_close(gradient_PV.double(), expected_PV, atol=atol, rtol=atol)


@each_loss
def test_value_and_gradient_equal_the_dense_reference(loss: LossSection) -> None:
    assert_equals_reference(random_case(loss))


@each_loss
def test_gradient_passes_gradcheck(loss: LossSection) -> None:
    case = random_case(loss, num_positions=2, num_vocab=6, width=7, k=3)

    class Replayed(torch.autograd.Function):
        """Evaluate anew for each backward pass: gradcheck makes many through one graph."""

        @staticmethod
        def forward(ctx: Any, logits_PV: Tensor) -> Tensor:
            ctx.save_for_backward(logits_PV)
            return evaluate(case._replace(logits_PV=logits_PV)).losses_P

        @staticmethod
        def backward(ctx: Any, grad_P: Tensor) -> Any:
            with torch.enable_grad():
                logits_PV = ctx.saved_tensors[0].detach().requires_grad_()
                losses_P = evaluate(case._replace(logits_PV=logits_PV)).losses_P
            return torch.autograd.grad(losses_P, logits_PV, grad_P)[0]

    assert gradcheck(Replayed.apply, (case.logits_PV,))


@each_loss
def test_float32_logits_are_within_rounding_of_the_reference(loss: LossSection) -> None:
    case = random_case(loss, dtype=torch.float32, num_vocab=60, width=64, k=8)
    assert evaluate(case).losses_P.dtype == torch.float32
    assert_equals_reference(case, atol=2e-5)


@each_loss
def test_bfloat16_logits_lose_nothing_but_the_last_rounding_of_the_gradient(
    loss: LossSection,
) -> None:
    case = random_case(loss, dtype=torch.bfloat16, num_vocab=60, width=64, k=8)
    losses_P = evaluate(case).losses_P
    gradient_PV = weighted_gradient(losses_P, case.logits_PV)
    expected_P, expected_PV = reference(case)
    assert losses_P.dtype == torch.float32
    assert gradient_PV.dtype == torch.bfloat16
    torch.testing.assert_close(losses_P.detach().double(), expected_P, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(gradient_PV.double(), expected_PV, atol=2e-5, rtol=2**-7)


@each_loss
def test_a_teacher_equal_to_the_student_costs_nothing_at_every_position(loss: LossSection) -> None:
    case = random_case(loss, num_positions=40, num_vocab=500, width=512, dtype=torch.float32)
    logprobs_PK = case.logits_PV.detach()[:, : case.num_vocab].log_softmax(-1)
    if case.ids_PK is not None:
        logprobs_PK, ids_PK = logprobs_PK.topk(32)
        case = case._replace(ids_PK=ids_PK)
    result = evaluate(case._replace(logprobs_PK=logprobs_PK))
    assert result.covered_P.all()
    assert result.losses_P.abs().max() < 1e-6
    assert weighted_gradient(result.losses_P, case.logits_PV).abs().max() < 1e-6


@each_loss
def test_an_uncovered_position_is_left_out_and_reported(loss: LossSection) -> None:
    case = random_case(loss)
    case.logprobs_PK[2] = MINUS_INF
    result = evaluate(case)
    gradient_PV = weighted_gradient(result.losses_P, case.logits_PV)
    assert result.covered_P.tolist() == [True, True, False, True, True, True]
    assert result.losses_P[2] == 0
    assert result.student_mass_P[2] == 0
    assert not gradient_PV[2].any()
    assert_equals_reference(case)


@each_loss
def test_absent_entries_are_masked_one_by_one_whatever_their_ids(loss: LossSection) -> None:
    case = random_case(loss)
    case.logprobs_PK[1, 2] = case.logprobs_PK[3, 1] = MINUS_INF
    if case.ids_PK is not None:
        case.ids_PK[1, 2] = case.ids_PK[1, 0]
        case.ids_PK[3, 1] = -1
    assert_equals_reference(case)


@each_loss
@pytest.mark.parametrize("lowest", [-1e4, MINUS_INF])
def test_a_one_hot_teacher_gives_a_finite_loss_that_pulls_towards_its_token(
    loss: LossSection, lowest: float
) -> None:
    case = random_case(loss)
    case.logprobs_PK.fill_(lowest)[:, 0] = 0.0
    assert_equals_reference(case, atol=1e-10)
    chosen_P = torch.zeros(6, dtype=torch.long) if case.ids_PK is None else case.ids_PK[:, 0]
    gradient_PV = weighted_gradient(evaluate(case).losses_P, case.logits_PV)
    pull_P = gradient_PV.gather(1, chosen_P[:, None])
    is_blind = case.ids_PK is not None and loss.tail == "renormalize" and lowest == MINUS_INF
    assert (pull_P == 0).all() if is_blind else (pull_P < 0).all()


@each_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_logits_of_ten_thousand_stay_finite_and_exact(
    loss: LossSection, dtype: torch.dtype
) -> None:
    case = random_case(loss, scale=1e4, dtype=dtype)
    assert_equals_reference(case, atol=1e-12 if dtype == torch.float64 else 1e-6)


@each_loss
def test_an_empty_completion_and_one_of_one_token_run_their_backward_pass(
    loss: LossSection,
) -> None:
    empty = random_case(loss, num_positions=0)
    losses_P = evaluate(empty).losses_P
    losses_P.sum().backward()
    assert losses_P.shape == (0,)
    assert empty.logits_PV.grad is not None
    assert empty.logits_PV.grad.shape == (0, 13)
    assert_equals_reference(random_case(loss, num_positions=1))


@each_loss
def test_a_batch_without_a_teacher_has_loss_0_and_a_finite_zero_gradient(loss: LossSection) -> None:
    case = random_case(loss)
    case.logprobs_PK.fill_(MINUS_INF)
    losses_P = evaluate(case).losses_P
    losses_P.sum().backward()
    assert not losses_P.any()
    assert case.logits_PV.grad is not None
    assert not case.logits_PV.grad.any()


@each_loss
def test_padding_columns_have_no_influence(loss: LossSection) -> None:
    case = random_case(loss)
    with torch.no_grad():
        case.logits_PV[:, case.num_vocab :] = 1e4
    gradient_PV = weighted_gradient(evaluate(case).losses_P, case.logits_PV)
    assert not gradient_PV[:, case.num_vocab :].any()
    narrow = case._replace(logits_PV=case.logits_PV.detach()[:, :11].clone().requires_grad_())
    torch.testing.assert_close(evaluate(case).losses_P, evaluate(narrow).losses_P)


@pytest.mark.parametrize("teacher_width", [9, 11, 16])
@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl"])
def test_the_full_vocabulary_is_the_shared_one(divergence: Any, teacher_width: int) -> None:
    loss = LossSection(divergence=divergence, support="full")
    case = random_case(loss, num_vocab=teacher_width, width=11)._replace(num_vocab=11)
    shared = min(11, teacher_width)
    expected_P = evaluate(
        case._replace(
            logits_PV=case.logits_PV[:, :shared],
            logprobs_PK=case.logprobs_PK[:, :shared].log_softmax(-1),
            num_vocab=shared,
        )
    ).losses_P
    torch.testing.assert_close(evaluate(case).losses_P, expected_P)
    assert_equals_reference(case)


def test_the_ends_of_beta_are_the_two_divergences() -> None:
    supports: tuple[Any, ...] = ("full", "top_k")
    for support in supports:
        ends: tuple[tuple[float, Any], ...] = ((0.0, "forward_kl"), (1.0, "reverse_kl"))
        for beta, divergence in ends:
            end = LossSection(divergence="jsd", beta=beta, support=support)
            plain = LossSection(divergence=divergence, support=support)
            assert torch.equal(
                evaluate(random_case(end)).losses_P, evaluate(random_case(plain)).losses_P
            )


def test_student_mass_is_the_probability_of_what_the_teacher_gave() -> None:
    top = random_case(LossSection())
    assert top.ids_PK is not None
    probabilities_PV = top.logits_PV.detach()[:, :11].softmax(-1)
    expected_P = probabilities_PV.gather(1, top.ids_PK).sum(-1)
    torch.testing.assert_close(evaluate(top).student_mass_P, expected_P)

    full = random_case(LossSection(support="full"))
    full.logprobs_PK[:, 3] = MINUS_INF
    expected_P = 1 - full.logits_PV.detach()[:, :11].softmax(-1)[:, 3]
    torch.testing.assert_close(evaluate(full).student_mass_P, expected_P)
    assert not evaluate(full).student_mass_P.requires_grad


@each_loss
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_student_that_is_not_finite_is_seen_in_the_loss(loss: LossSection, bad: float) -> None:
    case = random_case(loss)
    with torch.no_grad():
        case.logits_PV[1, 0] = bad
        if case.ids_PK is not None:
            case.ids_PK[1, 0] = 0
            case.ids_PK[1, 1:] = torch.tensor([4, 5, 6])
    is_finite_P = torch.isfinite(evaluate(case).losses_P)
    assert is_finite_P.tolist() == [True, False, True, True, True, True]


def test_scores_that_break_the_contract_are_refused() -> None:
    case = random_case(LossSection())
    assert case.ids_PK is not None
    case.ids_PK[3, 2] = 11
    with pytest.raises(TeacherAlignmentError, match="11"):
        evaluate(case)
    case.logprobs_PK[4, 0] = math.nan
    with pytest.raises(NonFiniteScoresError, match="nan"):
        evaluate(case)
    with pytest.raises(TeacherAlignmentError, match="5 positions"):
        evaluate(case._replace(logprobs_PK=case.logprobs_PK[:5], ids_PK=case.ids_PK[:5]))


def test_an_undefined_loss_is_refused() -> None:
    with pytest.raises(ConfigError, match="beta"):
        evaluate(random_case(LossSection(divergence="jsd")))
    with pytest.raises(ConfigError, match="beta"):
        evaluate(random_case(LossSection(divergence="reverse_kl", beta=0.5)))
    with pytest.raises(ConfigError, match="temperature"):
        evaluate(random_case(LossSection(tail="bucket", temperature=2.0)))
