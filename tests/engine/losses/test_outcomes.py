"""Properties of every divergence, on distributions of all kinds."""

import math
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opdkit.protocols.config import LossSection
from tests.engine.losses.reference import LOSSES, Case, evaluate, random_case, weighted_gradient

properties = settings(derandomize=True, deadline=None, max_examples=150, database=None)
losses = st.sampled_from(LOSSES)
seeds = st.integers(min_value=0, max_value=10_000)
scales = st.sampled_from([0.0, 1e-4, 0.1, 1.0, 10.0, 1e3, 1e4])


@properties
@given(loss=losses, seed=seeds, scale=scales, k=st.integers(min_value=1, max_value=30))
def test_no_divergence_is_negative_nor_its_gradient_infinite(
    loss: LossSection, seed: int, scale: float, k: int
) -> None:
    case = random_case(
        loss, num_vocab=30, width=32, k=k, scale=scale, dtype=torch.float32, seed=seed
    )
    losses_P = evaluate(case).losses_P
    gradient_PV = weighted_gradient(losses_P, case.logits_PV)
    assert losses_P.min() >= -1e-6
    assert torch.isfinite(losses_P).all()
    assert torch.isfinite(gradient_PV).all()


@properties
@given(loss=losses, seed=seeds, distance=st.sampled_from([0.0, 1e-5, 1e-3]))
def test_nearly_equal_models_have_a_loss_of_almost_0(
    loss: LossSection, seed: int, distance: float
) -> None:
    case = random_case(loss, num_vocab=400, width=400, k=32, dtype=torch.float32, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    logits_PV = case.logits_PV.detach()
    noise_PV = torch.randn(logits_PV.shape, generator=generator) * distance
    logprobs_PK, ids_PK = (logits_PV + noise_PV).log_softmax(-1), None
    if loss.support == "top_k":
        logprobs_PK, ids_PK = logprobs_PK.topk(32)
    losses_P = evaluate(Case(logits_PV, ids_PK, logprobs_PK, loss, 400)).losses_P
    assert losses_P.min() >= -1e-6
    assert losses_P.max() <= 1e-6 + 10 * distance**2


@properties
@given(loss=losses, seed=seeds, shift=st.sampled_from([-50.0, 3.0, 1e3]))
def test_a_shift_of_all_logits_changes_nothing_and_no_gradient_points_along_it(
    loss: LossSection, seed: int, shift: float
) -> None:
    case = random_case(loss, seed=seed)
    losses_P = evaluate(case).losses_P
    shifted = case._replace(logits_PV=case.logits_PV.detach() + shift)
    torch.testing.assert_close(evaluate(shifted).losses_P, losses_P.detach())
    gradient_PV = weighted_gradient(losses_P, case.logits_PV)
    assert gradient_PV.sum(-1).abs().max() < 1e-12


@properties
@given(seed=seeds, beta=st.floats(min_value=0.01, max_value=0.99))
def test_jsd_is_bounded_by_the_entropy_of_its_mixture(seed: int, beta: float) -> None:
    loss = LossSection(divergence="jsd", beta=beta, support="full")
    losses_P = evaluate(random_case(loss, seed=seed, scale=100.0)).losses_P
    bound = -beta * math.log(beta) - (1 - beta) * math.log(1 - beta)
    assert losses_P.max() <= bound + 1e-9


@properties
@given(seed=seeds, divergence=st.sampled_from(["forward_kl", "reverse_kl"]))
def test_the_bucket_never_exceeds_the_full_divergence(seed: int, divergence: Any) -> None:
    # Data processing: merging outcomes can only lose information.
    full = LossSection(divergence=divergence, support="full")
    bucket = LossSection(divergence=divergence, tail="bucket")
    full_P, bucket_P = (
        evaluate(random_case(loss, num_vocab=20, width=20, seed=seed)).losses_P
        for loss in (full, bucket)
    )
    assert (bucket_P <= full_P + 1e-9).all()
