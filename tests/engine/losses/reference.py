"""The losses once more, dense, in float64, by autograd; and inputs to compare on."""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from opdkit.engine.losses import PositionLosses, position_losses
from opdkit.engine.losses.chunks import TAIL_FLOOR
from opdkit.protocols.config import LossSection

SUPPORTS = (
    LossSection(support="full"),
    LossSection(support="full", temperature=2.0),
    LossSection(tail="bucket"),
    LossSection(tail="renormalize"),
    LossSection(tail="renormalize", temperature=0.5),
)
DIVERGENCES = (("forward_kl", None), ("reverse_kl", None), ("jsd", 0.1), ("jsd", 0.9))
LOSSES = tuple(
    LossSection(
        divergence=divergence,  # type: ignore[arg-type]
        beta=beta,
        support=support.support,
        tail=support.tail,
        temperature=support.temperature,
    )
    for divergence, beta in DIVERGENCES
    for support in SUPPORTS
)


def name_of(loss: LossSection) -> str:
    support = "full" if loss.support == "full" else loss.tail
    return f"{loss.divergence}-{loss.beta}-{support}-{loss.temperature:g}"


class Case(NamedTuple):
    """What goes into ``position_losses``."""

    logits_PV: Tensor
    ids_PK: Tensor | None
    logprobs_PK: Tensor
    loss: LossSection
    num_vocab: int


def random_case(
    loss: LossSection,
    *,
    num_positions: int = 6,
    num_vocab: int = 11,
    width: int = 13,
    k: int = 4,
    scale: float = 3.0,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Case:
    """Draw a student and a teacher; ``width`` - ``num_vocab`` columns of the student pad."""
    generator = torch.Generator().manual_seed(seed)

    def draw(num_columns: int) -> Tensor:
        shape = (num_positions, num_columns)
        return torch.randn(shape, generator=generator, dtype=torch.float64) * scale

    logits_PV = draw(width).to(dtype).requires_grad_()
    logprobs_PK, ids_PK = draw(num_vocab).log_softmax(-1), None
    if loss.support == "top_k":
        logprobs_PK, ids_PK = logprobs_PK.topk(k)
    return Case(logits_PV, ids_PK, logprobs_PK, loss, num_vocab)


def evaluate(
    case: Case, *, chunk_cells: int = 1 << 22, group: ProcessGroup | None = None
) -> PositionLosses:
    """Call the code under test."""
    return position_losses(
        case.logits_PV,
        teacher_ids_PK=case.ids_PK,
        teacher_logprobs_PK=case.logprobs_PK,
        loss=case.loss,
        num_vocab=case.num_vocab,
        group=group,
        chunk_cells=chunk_cells,
    )


def weighted_gradient(losses_P: Tensor, logits_PV: Tensor) -> Tensor:
    """Differentiate a sum that weighs every position differently."""
    weights_P = torch.linspace(0.5, 1.5, len(losses_P), dtype=losses_P.dtype)
    (gradient_PV,) = torch.autograd.grad((losses_P * weights_P).sum(), logits_PV)
    return gradient_PV


def reference(case: Case) -> tuple[Tensor, Tensor]:
    """Return losses and their ``weighted_gradient``, dense and in float64."""
    logits_PV = case.logits_PV.detach().double().requires_grad_()
    losses_P = torch.stack(
        [_reference_loss(case, position, logits_PV[position]) for position in range(len(logits_PV))]
    )
    return losses_P.detach(), weighted_gradient(losses_P, logits_PV)


def _reference_loss(case: Case, position: int, logits_V: Tensor) -> Tensor:
    loss, num_vocab = case.loss, case.num_vocab
    log_p = case.logprobs_PK[position].double() / loss.temperature
    if case.ids_PK is None:
        num_vocab = min(num_vocab, len(log_p))
        ids, log_p = torch.arange(num_vocab), log_p[:num_vocab].log_softmax(0)
    else:
        ids = case.ids_PK[position].long()
    ids, log_p = ids[log_p > -math.inf], log_p[log_p > -math.inf]
    if not len(ids):
        return logits_V.sum() * 0
    log_q_V = (logits_V[:num_vocab] / loss.temperature).log_softmax(0)
    log_q = log_q_V[ids]
    rest = [token_id for token_id in range(num_vocab) if token_id not in ids]
    if rest and (case.ids_PK is None or loss.tail == "bucket"):
        floor = TAIL_FLOOR if loss.divergence == "reverse_kl" else 0.0
        tail = (1 - log_p.exp().sum()).clamp_min(floor).log()
        log_p, log_q = (
            torch.hstack((log_p, tail)),
            torch.hstack((log_q, log_q_V[rest].logsumexp(0))),
        )
    return _divergence(log_p.log_softmax(0), log_q.log_softmax(0), loss)


def _divergence(log_p: Tensor, log_q: Tensor, loss: LossSection) -> Tensor:
    if loss.divergence == "forward_kl":
        return _kl(log_p, log_q)
    if loss.divergence == "reverse_kl":
        return _kl(log_q, log_p)
    assert loss.beta is not None
    log_m = torch.logaddexp(log_p + math.log(loss.beta), log_q + math.log(1 - loss.beta))
    return loss.beta * _kl(log_p, log_m) + (1 - loss.beta) * _kl(log_q, log_m)


def _kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    is_possible = log_a > -math.inf
    return (log_a[is_possible].exp() * (log_a - log_b)[is_possible]).sum()
