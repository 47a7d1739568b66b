# pyright: basic
"""One optimizer step, and one evaluation, over this rank's micro-batches.

The loss of a position is weighted by its share in the global batch, so gradients and losses are
plain sums over micro-batches and ranks: nothing is averaged, and no count of micro-batches enters.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from opdkit.actors.megatron.batches import MicroBatch
from opdkit.actors.megatron.model import Student, evaluating
from opdkit.actors.megatron.parallel import tensor_group
from opdkit.engine.losses import position_losses, token_logprobs
from opdkit.protocols.config import LossSection
from opdkit.protocols.messages import EvaluationReport, StepPlan, StepReport


@dataclasses.dataclass(kw_only=True)
class Sums:
    """Sums over positions; added up over ranks they are those of the global batch."""

    loss: float = 0.0
    """Of weighted losses."""
    divergence: float = 0.0
    """Of unweighted ones."""
    num_tokens: float = 0.0
    num_supervised: float = 0.0
    num_covered: float = 0.0
    student_mass: float = 0.0
    log_ratio: float = 0.0
    """Of log Q_train(y) - log P(y) over the covered positions."""
    sampler_gap: float = 0.0
    num_sampler_gaps: float = 0.0

    def over_ranks(self) -> "Sums":
        """Return the global sums, bit for bit the same on every rank."""
        values = torch.tensor(dataclasses.astuple(self), dtype=torch.float64)
        if parallel_state.get_tensor_model_parallel_rank() != 0:
            # Tensor-parallel ranks see the same positions: one of them speaks.
            values.zero_()
        if torch.cuda.is_available():
            values = values.cuda()
        dist.all_reduce(values)
        return Sums(**dict(zip(_SUM_NAMES, values.tolist(), strict=True)))


_SUM_NAMES = tuple(field.name for field in dataclasses.fields(Sums))


def take_step(student: Student, batches: Sequence[MicroBatch], plan: StepPlan) -> StepReport:
    """Run forward and backward over the micro-batches, and move the weights.

    A loss or gradient that is not finite moves nothing: the report says ``skipped``.
    ``fetch_s`` is left at 0.
    """
    started = time.perf_counter()
    sums = Sums()
    student.model.zero_grad_buffer()
    student.optimizer.zero_grad()
    get_forward_backward_func()(
        forward_step_func=functools.partial(_forward_step, student, sums),
        data_iterator=iter(batches),
        model=[student.model],
        num_microbatches=len(batches),
        seq_length=student.settings.max_sequence_tokens,
        micro_batch_size=1,
        forward_only=False,
    )
    totals = sums.over_ranks()
    learning_rate = student.optimizer.param_groups[0]["lr"]
    grad_norm, skipped = _move_weights(student, math.isfinite(totals.loss))
    return StepReport(
        step=plan.step,
        loss=totals.loss,
        grad_norm=grad_norm,
        learning_rate=learning_rate,
        num_tokens=int(totals.num_tokens),
        num_supervised=int(totals.num_supervised),
        num_uncovered=int(totals.num_supervised - totals.num_covered),
        reverse_kl_estimate=_mean(totals.log_ratio, totals.num_covered),
        sampler_gap=_mean(totals.sampler_gap, totals.num_sampler_gaps),
        student_mass=_mean(totals.student_mass, totals.num_covered),
        num_microbatches=len(batches),
        step_s=time.perf_counter() - started,
        fetch_s=0.0,
        skipped=skipped,
    )


def evaluate(student: Student, batches: Sequence[MicroBatch], plan: StepPlan) -> EvaluationReport:
    """Measure the reverse KL divergence without moving anything.

    Of the samples themselves a rank knows their supervised tokens only: it takes those for the
    generated ones, and reports no truncation. Whoever holds their ``SampleMeta`` knows better.
    """
    job = student.settings.loss
    measured = LossSection(
        divergence="reverse_kl", support=job.support, top_k=job.top_k, tail="bucket"
    )
    sums = Sums()
    with evaluating(student):
        for batch in batches:
            _measure(student, measured, batch, sums, student.model(batch))
    totals = sums.over_ranks()
    sample_ids = {ref.sample_id for rank in plan.microbatches for refs in rank for ref in refs}
    return EvaluationReport(
        step=plan.step,
        num_samples=len(sample_ids),
        num_supervised=int(totals.num_supervised),
        reverse_kl=_mean(totals.log_ratio, totals.num_covered),
        reverse_kl_on_support=_mean(totals.divergence, totals.num_covered),
        mean_generated_tokens=_mean(totals.num_supervised, len(sample_ids)),
        truncated_fraction=0.0,
    )


def _forward_step(
    student: Student, sums: Sums, batches: Iterator[MicroBatch], model: Any
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]]:
    """Return logits, and the function of them that Megatron's schedule differentiates."""
    batch = next(batches)

    def weighted_loss(logits_PV: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        loss = _measure(student, student.settings.loss, batch, sums, logits_PV)
        # The count would be Megatron's denominator; the weights hold ours.
        return loss, torch.ones((), dtype=torch.int, device=loss.device), {}

    return model(batch), weighted_loss


def _measure(
    student: Student, loss: LossSection, batch: MicroBatch, sums: Sums, logits_PV: Tensor
) -> Tensor:
    """Return the micro-batch's part of the global loss, and count what the report needs."""
    settings = student.settings
    group = tensor_group()
    result = position_losses(
        logits_PV,
        teacher_ids_PK=batch.teacher_ids_PK,
        teacher_logprobs_PK=batch.teacher_logprobs_PK,
        loss=loss,
        num_vocab=settings.num_vocab,
        group=group,
    )
    weighted = (result.losses_P * batch.weights_P).sum()
    with torch.no_grad():
        real = slice(batch.num_positions)
        logprobs_P = token_logprobs(
            logits_PV, batch.targets_P, num_vocab=settings.num_vocab, group=group
        )[real]
        at_sampling_P = logprobs_P
        if settings.sampling_temperature != 1.0:
            at_sampling_P = token_logprobs(
                logits_PV.float() / settings.sampling_temperature,
                batch.targets_P,
                num_vocab=settings.num_vocab,
                group=group,
            )[real]
        covered_P = result.covered_P[real]
        gap_P = (at_sampling_P - batch.sampler_logprobs_P[real]).abs()
        known_P = ~gap_P.isnan()
        sums.loss += float(weighted)
        sums.divergence += float(result.losses_P[real].sum(dtype=torch.float64))
        sums.num_tokens += batch.num_tokens
        sums.num_supervised += batch.num_positions
        sums.num_covered += int(covered_P.sum())
        sums.student_mass += float(result.student_mass_P[real][covered_P].sum())
        sums.log_ratio += float((logprobs_P - batch.teacher_sampled_P[real])[covered_P].sum())
        sums.sampler_gap += float(gap_P[known_P].sum())
        sums.num_sampler_gaps += int(known_P.sum())
    return weighted


def _move_weights(student: Student, loss_is_finite: bool) -> tuple[float, bool]:
    """Clip and apply the gradient; return its norm and whether the step was skipped."""
    [optimizer] = student.optimizer.chained_optimizers
    optimizer.prepare_grads()
    grad_norm = float(optimizer.clip_grad_norm(student.settings.trainer.optimizer.clip_grad))
    # Both are the same on every rank, so all of them skip or none.
    if not (loss_is_finite and math.isfinite(grad_norm)):
        return grad_norm, True
    optimizer.step_with_ready_grads()
    student.schedule.step(increment=1)
    return grad_norm, False


def _mean(total: float, count: float) -> float:
    return total / count if count else 0.0
