"""Two and three real gloo ranks give what one process gives: values and gradients."""

import math
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from opdkit.engine.losses import token_logprobs
from opdkit.protocols.errors import TeacherAlignmentError
from tests.engine.losses.ranks import run_ranks
from tests.engine.losses.reference import (
    LOSSES,
    Case,
    evaluate,
    random_case,
    reference,
    weighted_gradient,
)


class RankResult(NamedTuple):
    """What one rank computes of one case. Plain numbers: they outlive the process."""

    losses: list[float]
    covered: list[bool]
    student_mass: list[float]
    gradient: list[list[float]]


def nasty_cases(*, num_vocab: int, width: int, dtype: torch.dtype, scale: float) -> list[Case]:
    """Return a case for each loss, with an uncovered row and absent entries."""
    cases: list[Case] = []
    for seed, loss in enumerate(LOSSES):
        case = random_case(
            loss, num_vocab=num_vocab, width=width, dtype=dtype, scale=scale, seed=seed
        )
        case.logprobs_PK[1, 2] = -math.inf
        case.logprobs_PK[2] = -math.inf
        case.logprobs_PK[4].fill_(-math.inf)[0] = 0.0
        cases.append(case)
    return cases


def columns_of(logits_PV: Tensor, group: ProcessGroup) -> Tensor:
    return logits_PV.detach().chunk(group.size(), dim=1)[group.rank()].contiguous()


def evaluate_shard(group: ProcessGroup, cases: list[Case]) -> list[RankResult]:
    results: list[RankResult] = []
    for case in cases:
        shard = case._replace(logits_PV=columns_of(case.logits_PV, group).requires_grad_())
        losses_P, covered_P, student_mass_P = evaluate(shard, chunk_cells=20, group=group)
        gradient_PV = weighted_gradient(losses_P, shard.logits_PV)
        values = (losses_P.detach(), covered_P, student_mass_P, gradient_PV.double())
        results.append(RankResult(*(value.tolist() for value in values)))
    return results


# 24 columns in all. 19: the last rank holds real and padding columns. 7: the last of three ranks
# holds padding alone.
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("num_vocab", [19, 7])
def test_a_split_vocabulary_gives_the_dense_loss_and_gradient(
    num_ranks: int, num_vocab: int, tmp_path: Path
) -> None:
    exact = nasty_cases(num_vocab=num_vocab, width=24, dtype=torch.float64, scale=3.0)
    rounded = nasty_cases(num_vocab=num_vocab, width=24, dtype=torch.float32, scale=100.0)
    ranks = run_ranks(
        evaluate_shard, exact + rounded, num_ranks=num_ranks, store=tmp_path / "store"
    )
    for index, case in enumerate(exact + rounded):
        results = [rank[index] for rank in ranks]
        assert all(result[:3] == results[0][:3] for result in results)
        assert results[0].covered == [True, True, False, True, True, True]
        losses_P, gradient_PV = reference(case)
        tolerance = 1e-12 if index < len(exact) else 1e-4
        torch.testing.assert_close(
            torch.tensor(results[0].losses, dtype=torch.float64),
            losses_P,
            atol=tolerance,
            rtol=tolerance,
        )
        torch.testing.assert_close(
            torch.hstack(
                [torch.tensor(result.gradient, dtype=torch.float64) for result in results]
            ),
            gradient_PV,
            atol=tolerance,
            rtol=tolerance,
        )
        torch.testing.assert_close(
            torch.tensor(results[0].student_mass, dtype=case.logits_PV.dtype),
            evaluate(case).student_mass_P,
        )


def score_shard(group: ProcessGroup, logits_PV: Tensor, ids_P: Tensor) -> list[float]:
    logprobs_P = token_logprobs(
        columns_of(logits_PV, group), ids_P, num_vocab=19, group=group, chunk_cells=20
    )
    return logprobs_P.tolist()


def refuse_shard(group: ProcessGroup, case: Case) -> str:
    shard = case._replace(logits_PV=columns_of(case.logits_PV, group))
    with pytest.raises(TeacherAlignmentError) as refusal:
        evaluate(shard, group=group)
    return str(refusal.value)


def test_a_split_vocabulary_gives_the_dense_log_probabilities(tmp_path: Path) -> None:
    logits_PV = torch.randn(19, 24, generator=torch.Generator().manual_seed(0)) * 30
    ids_P = torch.arange(19)
    expected_P = logits_PV[:, :19].double().log_softmax(-1).diagonal()
    for logprobs in run_ranks(
        score_shard, logits_PV, ids_P, num_ranks=3, store=tmp_path / "store"
    ):
        torch.testing.assert_close(torch.tensor(logprobs).double(), expected_P, atol=1e-5, rtol=1e-6)


def test_all_ranks_refuse_the_same_scores(tmp_path: Path) -> None:
    case = random_case(LOSSES[2], num_vocab=19, width=24)
    assert case.ids_PK is not None
    case.ids_PK[5, 1] = 19
    case = case._replace(logits_PV=case.logits_PV.detach())
    messages = run_ranks(refuse_shard, case, num_ranks=2, store=tmp_path / "store")
    assert messages == ["teacher id 19 at supervised position 5, but the student's vocabulary has "
                        "ids 0 to 18"] * 2
