# pyright: basic
# torch annotates its process groups in part.
"""Two and three real gloo ranks give what one process gives: values and gradients."""

import math
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from opdkit.engine.losses import token_logprobs
from opdkit.protocols.config import LossSection
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

# Importing torch in the process that the ranks are forked from, on a busy machine.
pytestmark = pytest.mark.timeout(60)

WIDTH = 24
"""Columns of the whole vocabulary, padding included."""


class RankResult(NamedTuple):
    """What one rank computes of one case, as plain numbers."""

    losses: list[float]
    covered: list[bool]
    student_mass: list[float]
    gradient: list[list[float]]


def nasty_cases() -> list[Case]:
    """Return cases of every loss, with an uncovered row, absent entries and a one-hot row.

    Of 24 columns 19 are real: the last rank holds both kinds; or 7: the last two of three ranks
    hold padding alone, or nearly.
    """
    cases: list[Case] = []
    for seed, loss in enumerate(LOSSES):
        for num_vocab, dtype, scale in (
            (19, torch.float64, 3.0),
            (7, torch.float64, 3.0),
            (19, torch.float32, 100.0),
        ):
            case = random_case(
                loss, num_vocab=num_vocab, width=WIDTH, dtype=dtype, scale=scale, seed=seed
            )
            case.logprobs_PK[1, 2] = -math.inf
            case.logprobs_PK[2] = -math.inf
            case.logprobs_PK[4].fill_(-math.inf)[0] = 0.0
            cases.append(case)
    return cases


def columns_of(logits_PV: Tensor, group: ProcessGroup) -> Tensor:
    return logits_PV.detach().chunk(group.size(), dim=1)[group.rank()].contiguous()


def evaluate_columns(group: ProcessGroup) -> list[RankResult]:
    results: list[RankResult] = []
    for case in nasty_cases():
        mine = case._replace(logits_PV=columns_of(case.logits_PV, group).requires_grad_())
        losses_P, covered_P, student_mass_P = evaluate(mine, chunk_cells=20, group=group)
        gradient_PV = weighted_gradient(losses_P, mine.logits_PV)
        values = (losses_P.detach(), covered_P, student_mass_P, gradient_PV)
        results.append(RankResult(*(value.tolist() for value in values)))
    return results


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_split_vocabulary_gives_the_dense_loss_and_gradient(
    num_ranks: int, tmp_path: Path
) -> None:
    ranks = run_ranks(evaluate_columns, num_ranks=num_ranks, store=tmp_path / "store")
    for case, *results in zip(nasty_cases(), *ranks, strict=True):
        assert all(rank[:3] == results[0][:3] for rank in results)
        assert results[0].covered == [True, True, False, True, True, True]
        found = (
            torch.tensor(results[0].losses, dtype=torch.float64),
            torch.hstack([torch.tensor(rank.gradient, dtype=torch.float64) for rank in results]),
        )
        tolerance = 1e-12 if case.logits_PV.dtype == torch.float64 else 1e-4
        torch.testing.assert_close(found, reference(case), atol=tolerance, rtol=tolerance)
        student_mass_P = torch.tensor(results[0].student_mass, dtype=case.logits_PV.dtype)
        torch.testing.assert_close(student_mass_P, evaluate(case).student_mass_P)


def random_logits() -> Tensor:
    return torch.randn(19, WIDTH, generator=torch.Generator().manual_seed(0)) * 30


def score_columns(group: ProcessGroup) -> list[float]:
    logits_PV = columns_of(random_logits(), group)
    ids_P = torch.arange(19)
    return token_logprobs(logits_PV, ids_P, num_vocab=19, group=group, chunk_cells=20).tolist()


def test_a_split_vocabulary_gives_the_dense_log_probabilities(tmp_path: Path) -> None:
    expected_P = random_logits()[:, :19].double().log_softmax(-1).diagonal()
    for logprobs in run_ranks(score_columns, num_ranks=3, store=tmp_path / "store"):
        logprobs_P = torch.tensor(logprobs, dtype=torch.float64)
        torch.testing.assert_close(logprobs_P, expected_P, atol=1e-5, rtol=1e-6)


def refuse_columns(group: ProcessGroup) -> str:
    case = random_case(LossSection(), num_vocab=19, width=WIDTH)
    assert case.ids_PK is not None
    case.ids_PK[5, 1] = 19
    with pytest.raises(TeacherAlignmentError) as refusal:
        evaluate(case._replace(logits_PV=columns_of(case.logits_PV, group)), group=group)
    return str(refusal.value)


def test_all_ranks_refuse_the_same_scores(tmp_path: Path) -> None:
    messages = run_ranks(refuse_columns, num_ranks=2, store=tmp_path / "store")
    assert messages[0] == messages[1]
    assert "teacher id 19 at supervised position 5" in messages[0]
