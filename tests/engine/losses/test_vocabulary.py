"""Log-probabilities of single tokens."""

import pytest
import torch

from opdkit.engine.losses import token_logprobs
from opdkit.protocols.errors import GenerationError


def random_logits(scale: float = 3.0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(11, 13, generator=generator, dtype=torch.float64) * scale).to(dtype)


@pytest.mark.parametrize("chunk_cells", [1, 40, 1 << 22])
def test_they_equal_a_log_softmax_over_the_real_columns(chunk_cells: int) -> None:
    logits_PV = random_logits()
    logprobs_P = token_logprobs(
        logits_PV, torch.arange(11, dtype=torch.int32), num_vocab=11, chunk_cells=chunk_cells
    )
    expected_P = logits_PV[:, :11].log_softmax(-1).diagonal()
    torch.testing.assert_close(logprobs_P, expected_P, atol=1e-13, rtol=1e-13)


@pytest.mark.parametrize("scale", [3.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_are_float32_at_least(dtype: torch.dtype, scale: float) -> None:
    logits_PV = random_logits(scale, dtype).requires_grad_()
    logprobs_P = token_logprobs(logits_PV, torch.arange(11), num_vocab=11)
    expected_P = logits_PV.detach()[:, :11].double().log_softmax(-1).diagonal()
    assert logprobs_P.dtype == torch.float32
    assert not logprobs_P.requires_grad
    torch.testing.assert_close(logprobs_P.double(), expected_P, atol=1e-6, rtol=1e-6)


def test_no_positions_have_none() -> None:
    logprobs_P = token_logprobs(torch.empty(0, 13), torch.arange(0), num_vocab=11)
    assert logprobs_P.shape == (0,)


@pytest.mark.parametrize("bad", [11, -1])
def test_an_id_outside_the_vocabulary_is_refused(bad: int) -> None:
    ids_P = torch.arange(11)
    ids_P[4] = bad
    with pytest.raises(GenerationError, match=rf"id {bad} at .* position 4, .* ids 0 to 10"):
        token_logprobs(random_logits(), ids_P, num_vocab=11)
