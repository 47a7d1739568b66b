"""The distillation loss of every supervised position, with its exact gradient.

The gradient is formed in the forward pass, chunk of positions by chunk, and is all that waits for
the backward pass, which scales it in place: besides the logits there is one block of their size
and a few of a chunk's. A second backward pass through the same losses is refused by autograd.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from opdkit.engine.losses.chunks import ChunkLosses, Objective
from opdkit.engine.losses.full_support import full_losses
from opdkit.engine.losses.scores import check_scores
from opdkit.engine.losses.top_k import top_k_losses
from opdkit.engine.losses.vocabulary import (
    CHUNK_CELLS,
    VocabularyShard,
    row_chunks,
    shard_of,
    working_dtype,
)
from opdkit.protocols.config import LossSection
from opdkit.protocols.errors import ConfigError, TeacherAlignmentError

BETAS = {"forward_kl": 0.0, "reverse_kl": 1.0}
"""The ends of ``loss.beta`` by name."""


class PositionLosses(NamedTuple):
    """One entry a supervised position; float32, or float64 for float64 logits."""

    losses_P: Tensor
    """Nats, not normalised; differentiable with respect to the logits."""
    covered_P: Tensor
    """bool; false where the teacher gave nothing: there loss and gradient are 0."""
    student_mass_P: Tensor
    """The student's probability, at the loss temperature, of the tokens that the teacher gave."""


def position_losses(
    logits_PV: Tensor,
    *,
    teacher_ids_PK: Tensor | None,
    teacher_logprobs_PK: Tensor,
    loss: LossSection,
    num_vocab: int,
    group: dist.ProcessGroup | None = None,
    chunk_cells: int = CHUNK_CELLS,
) -> PositionLosses:
    """Return the divergence between teacher and student at each of P positions.

    All ranks of ``group`` call it together with the same teacher; each then has the same losses
    and the gradient of its own columns.

    Args:
        logits_PV: the student's, any floating dtype: this rank's columns of the vocabulary.
        teacher_ids_PK: the teacher's K tokens; None: column i is id i, and both models are cut to
            the ids that they share.
        teacher_logprobs_PK: natural logarithms at temperature 1; -inf marks an absent entry.
        loss: which divergence, over which support. Definitions: docs/losses.md.
        num_vocab: number of real ids; the student's columns from there on are padding.
        group: the tensor-parallel group; None: this rank holds the whole vocabulary.
        chunk_cells: logits worked on at once, the same on all ranks.

    Raises:
        ConfigError: ``loss`` is not defined.
        NonFiniteScoresError, TeacherAlignmentError: as ``check_scores``, or the number of
            positions differs from that of the logits.
    """
    if teacher_logprobs_PK.shape[0] != logits_PV.shape[0]:
        raise TeacherAlignmentError(
            f"teacher scores cover {teacher_logprobs_PK.shape[0]} positions, "
            f"the student's logits {logits_PV.shape[0]}"
        )
    check_scores(teacher_logprobs_PK, teacher_ids_PK=teacher_ids_PK, num_vocab=num_vocab)
    if teacher_ids_PK is None:
        num_vocab = min(num_vocab, teacher_logprobs_PK.shape[1])
    shard = shard_of(logits_PV, num_vocab=num_vocab, group=group)
    objective = _objective(loss, shard, is_full=teacher_ids_PK is None)
    needs_gradient = logits_PV.requires_grad and torch.is_grad_enabled()
    chunk_losses = _chunk_losses(
        logits_PV.detach(), teacher_ids_PK, teacher_logprobs_PK, objective, needs_gradient
    )
    return PositionLosses(*_InChunks.apply(logits_PV, chunk_losses, chunk_cells, needs_gradient))  # type: ignore[no-untyped-call]


def _objective(loss: LossSection, shard: VocabularyShard, *, is_full: bool) -> Objective:
    if (loss.divergence == "jsd") != (loss.beta is not None):
        raise ConfigError(
            f"loss.beta is {loss.beta} with loss.divergence {loss.divergence!r}, "
            "but must be given for 'jsd' and only for it"
        )
    if not is_full and loss.tail == "bucket" and loss.temperature != 1.0:
        raise ConfigError(
            f"loss.temperature is {loss.temperature}, but must be 1 with loss.tail 'bucket': "
            "the teacher's tail is known at 1 only"
        )
    beta = loss.beta if loss.beta is not None else BETAS[loss.divergence]
    return Objective(beta, loss.temperature, loss.tail, shard)


def _chunk_losses(
    logits_PV: Tensor,
    ids_PK: Tensor | None,
    logprobs_PK: Tensor,
    objective: Objective,
    needs_gradient: bool,
) -> Callable[[slice], ChunkLosses]:
    first_id, num_columns = objective.shard.first_id, objective.shard.num_columns

    def full(rows: slice) -> ChunkLosses:
        teacher_CV = logprobs_PK[rows, first_id : first_id + num_columns]
        logits_CV = logits_PV[rows, :num_columns]
        return full_losses(logits_CV, teacher_CV, objective, needs_gradient=needs_gradient)

    def top_k(rows: slice) -> ChunkLosses:
        assert ids_PK is not None
        return top_k_losses(
            logits_PV[rows, :num_columns],
            ids_PK[rows],
            logprobs_PK[rows],
            objective,
            needs_gradient=needs_gradient,
        )

    return full if ids_PK is None else top_k


class _InChunks(torch.autograd.Function):
    """Losses by ``chunk_losses``, which gives the gradient along with the value."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_PV: Tensor,
        chunk_losses: Callable[[slice], ChunkLosses],
        chunk_cells: int,
        needs_gradient: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_positions, dtype = logits_PV.shape[0], working_dtype(logits_PV)
        losses_P = logits_PV.new_empty(num_positions, dtype=dtype)
        covered_P = logits_PV.new_empty(num_positions, dtype=torch.bool)
        student_mass_P = logits_PV.new_empty(num_positions, dtype=dtype)
        # Zero where padding is: no chunk writes there.
        gradient_PV = torch.zeros_like(logits_PV) if needs_gradient else None
        for rows in row_chunks(logits_PV, chunk_cells):
            chunk = chunk_losses(rows)
            losses_P[rows] = chunk.losses_C
            covered_P[rows] = chunk.covered_C
            student_mass_P[rows] = chunk.student_mass_C
            if gradient_PV is not None and chunk.gradient_CV is not None:
                gradient_PV[rows, : chunk.gradient_CV.shape[1]] = chunk.gradient_CV
        ctx.mark_non_differentiable(covered_P, student_mass_P)
        ctx.save_for_backward(gradient_PV)
        ctx.chunk_cells = chunk_cells
        return losses_P, covered_P, student_mass_P

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient_PV,) = ctx.saved_tensors
        # In place: the raised version counter is what refuses a second pass. In chunks: for
        # bfloat16 the product is taken in a float32 copy.
        for rows in row_chunks(gradient_PV, ctx.chunk_cells):
            gradient_PV[rows].mul_(grad_outputs[0][rows, None])
        return gradient_PV, None, None, None
