# pyright: basic
"""One micro-batch: sequences packed end to end, with the teacher's scores at their positions.

Row j of the logits predicts token j + 1, so the loss of a supervised token at index p of its
sequence, p >= 1, is taken at the row of token p - 1.

Shapes: T tokens of all sequences, P supervised positions, K tokens of the teacher's support.
A micro-batch without a supervised position (a filler too) has P = 1: one row of weight 0, so that
the rank takes part in every collective.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from opdkit.protocols.config import LossSection
from opdkit.protocols.errors import TrainerError
from opdkit.protocols.messages import (
    Sample,
    ScoredSegment,
    Segment,
    SegmentRef,
    StepPlan,
    TeacherScores,
)

FILLER_TOKEN = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Tensors of one forward pass, on the rank's device."""

    tokens_T: Tensor
    """int64."""
    positions_T: Tensor
    """int64, from 0 in each sequence."""
    bounds: Tensor
    """int32, first token of each sequence, and T."""
    longest: int
    """Tokens of the longest sequence."""
    rows_P: Tensor
    """int64, indices into T whose logits are wanted."""
    targets_P: Tensor
    """int64, the tokens that those logits predict."""
    weights_P: Tensor
    """float32, share of each position's loss in the global loss."""
    teacher_ids_PK: Tensor | None
    """int64; None: column i is id i."""
    teacher_logprobs_PK: Tensor
    """float32, nats."""
    teacher_sampled_P: Tensor
    """float32, nats, of the target."""
    sampler_logprobs_P: Tensor
    """float32, nats, of the target when it was sampled; NaN where that is not known."""
    num_tokens: int
    """Without fillers."""
    num_positions: int
    """Without the row of weight 0."""

    def packed_sequences(self) -> PackedSeqParams:
        """Return the bounds as Megatron's attention wants them."""
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=self.bounds,
            cu_seqlens_kv=self.bounds,
            max_seqlen_q=self.longest,
            max_seqlen_kv=self.longest,
        )


def build_microbatches(
    plan: StepPlan,
    *,
    data_rank: int,
    samples: Mapping[str, Sample],
    loss: LossSection,
    num_vocab: int,
    token_multiple: int,
) -> list[MicroBatch]:
    """Build what one data-parallel rank trains on in a step.

    ``token_multiple`` divides T: sequence parallelism cuts a pack into equal parts.

    Raises:
        TrainerError: a payload is missing, or is not what the plan says it is.
    """
    return [
        _build(
            [(find_segment(ref, samples), weight_of(ref, plan, loss)) for ref in refs],
            loss=loss,
            num_vocab=num_vocab,
            token_multiple=token_multiple,
        )
        for refs in plan.microbatches[data_rank]
    ]


def find_segment(ref: SegmentRef, samples: Mapping[str, Sample]) -> ScoredSegment:
    """Return the segment that the plan refers to."""
    sample = samples.get(ref.sample_id)
    if sample is None or ref.index >= len(sample.segments):
        raise TrainerError(
            f"the plan wants segment {ref.index} of sample {ref.sample_id!r}, which is not here"
        )
    scored = sample.segments[ref.index]
    actual = scored.segment.num_tokens, scored.segment.num_supervised
    if actual != (ref.num_tokens, ref.num_supervised):
        raise TrainerError(
            f"segment {ref.index} of sample {ref.sample_id!r} has {actual} tokens and supervised "
            f"tokens, the plan says {(ref.num_tokens, ref.num_supervised)}"
        )
    return scored


def weight_of(ref: SegmentRef, plan: StepPlan, loss: LossSection) -> float:
    """Return the factor of each of a segment's position losses in the global loss.

    ``token``: 1 / all supervised tokens. ``sequence``: 1 / (all sequences x tokens of this one).
    The counts are the plan's, of the whole global batch, so the split changes nothing.
    """
    if ref.num_supervised == 0:
        return 0.0
    if loss.normalize == "token":
        return 1.0 / plan.num_supervised
    return 1.0 / (plan.num_sequences * ref.num_supervised)


def _build(
    weighted: Sequence[tuple[ScoredSegment, float]],
    *,
    loss: LossSection,
    num_vocab: int,
    token_multiple: int,
) -> MicroBatch:
    segments = [scored.segment for scored, _ in weighted if scored.segment.num_tokens]
    lengths = [segment.num_tokens for segment in segments]
    num_tokens = sum(lengths)
    # The last sequence is a filler: where there is no other, and to round T up.
    filler = -num_tokens % token_multiple if num_tokens else token_multiple
    tokens = [_array(segment.token_ids, np.int32) for segment in segments]
    lengths += [filler] if filler else []
    tokens += [np.full(filler, FILLER_TOKEN, np.int32)] if filler else []
    positions = [
        _supervised(scored.segment, weight, start)
        for (scored, weight), start in zip(
            [pair for pair in weighted if pair[0].segment.num_tokens],
            accumulate(lengths, initial=0),
            strict=False,
        )
    ]
    scores = [scored.scores for scored, _ in weighted if scored.scores.num_positions]
    num_positions = sum(one.num_positions for one in scores)
    if not num_positions:
        positions = [_FILLER_POSITION]
        scores = [_filler_scores(loss, num_vocab)]
    ids, logprobs = _support(scores, num_vocab)
    rows, targets, weights, sampled = (
        np.concatenate(part) for part in zip(*positions, strict=True)
    )
    return MicroBatch(
        tokens_T=_tensor(np.concatenate(tokens), torch.int64),
        positions_T=_tensor(np.concatenate([np.arange(n) for n in lengths]), torch.int64),
        bounds=_tensor(np.cumsum([0, *lengths]), torch.int32),
        longest=max(lengths),
        rows_P=_tensor(rows, torch.int64),
        targets_P=_tensor(targets, torch.int64),
        weights_P=_tensor(weights, torch.float32),
        teacher_ids_PK=None if ids is None else _tensor(ids, torch.int64),
        teacher_logprobs_PK=_tensor(logprobs, torch.float32),
        teacher_sampled_P=_tensor(
            np.concatenate([_array(one.sampled_logprobs, np.float32) for one in scores]),
            torch.float32,
        ),
        sampler_logprobs_P=_tensor(sampled, torch.float32),
        num_tokens=num_tokens,
        num_positions=num_positions,
    )


_FILLER_POSITION = (
    np.zeros(1, np.int64),
    np.full(1, FILLER_TOKEN, np.int32),
    np.zeros(1, np.float32),
    np.full(1, np.nan, np.float32),
)


def _supervised(segment: Segment, weight: float, start: int) -> tuple[np.ndarray, ...]:
    """Return rows, targets, weights and sampler's log-probabilities of a segment's positions."""
    indices = np.flatnonzero(_array(segment.loss_mask, np.uint8))
    if segment.sampler_logprobs:
        sampled = _array(segment.sampler_logprobs, np.float32)[indices]
    else:
        sampled = np.full(len(indices), np.nan, np.float32)
    return (
        start + indices - 1,
        _array(segment.token_ids, np.int32)[indices],
        np.full(len(indices), weight, np.float32),
        sampled,
    )


def _support(
    scores: Sequence[TeacherScores], num_vocab: int
) -> tuple[np.ndarray | None, np.ndarray]:
    """Return the teacher's ids [P, K] (None: all of the vocabulary) and log-probabilities."""
    logprobs = [
        _array(one.logprobs, np.float32).reshape(one.num_positions, one.support_size)
        for one in scores
    ]
    if not scores[0].token_ids:
        return None, np.concatenate(logprobs)[:, :num_vocab]
    ids = [
        _array(one.token_ids, np.int32).reshape(one.num_positions, one.support_size)
        for one in scores
    ]
    return np.concatenate(ids), np.concatenate(logprobs)


def _filler_scores(loss: LossSection, num_vocab: int) -> TeacherScores:
    """Return scores of one position that the teacher does not cover."""
    size = loss.top_k if loss.support == "top_k" else num_vocab
    return TeacherScores(
        num_positions=1,
        support_size=size,
        token_ids=np.arange(size, dtype=np.int32).tobytes() if loss.support == "top_k" else b"",
        logprobs=np.full(size, -np.inf, np.float32).tobytes(),
        sampled_logprobs=np.zeros(1, np.float32).tobytes(),
        tail_mass=np.ones(1, np.float32).tobytes(),
    )


def _array(data: bytes, dtype: type[np.generic]) -> np.ndarray:
    return np.frombuffer(data, np.dtype(dtype).newbyteorder("<"))


def _tensor(array: np.ndarray, dtype: torch.dtype) -> Tensor:
    # A copy: the payload's bytes are read-only, which a tensor cannot be.
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.tensor(array, dtype=dtype, device=device)
