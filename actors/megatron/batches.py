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

from opdkit.engine.losses import position_weights
from opdkit.protocols.config import LossSection
from opdkit.protocols.errors import TrainerError
from opdkit.protocols.ids import PolicyVersion
from opdkit.protocols.messages import (
    Sample,
    ScoredSegment,
    Segment,
    SegmentRef,
    StepPlan,
    TeacherScores,
    VersionSpan,
)


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
    filler = _filler(num_vocab if loss.support == "full" else None)
    microbatches: list[MicroBatch] = []
    for refs in plan.microbatches[data_rank]:
        weights_P = position_weights(
            [ref.num_supervised for ref in refs],
            normalize=loss.normalize,
            num_supervised=plan.num_supervised,
            num_sequences=plan.num_sequences,
        )
        scored = [_find_segment(ref, samples) for ref in refs]
        microbatches.append(_pack(scored, weights_P, filler=filler, token_multiple=token_multiple))
    return microbatches


def _find_segment(ref: SegmentRef, samples: Mapping[str, Sample]) -> ScoredSegment:
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


def _pack(
    scored: Sequence[ScoredSegment],
    weights_P: Tensor,
    *,
    filler: ScoredSegment,
    token_multiple: int,
) -> MicroBatch:
    segments = [one.segment for one in scored]
    num_tokens = sum(segment.num_tokens for segment in segments)
    num_positions = len(weights_P)
    if not num_positions:
        scored, weights_P = [*scored, filler], torch.zeros(1)
    # A last sequence of fillers rounds T up, or is all there is.
    num_fillers = -num_tokens % token_multiple if num_tokens else token_multiple
    lengths = [segment.num_tokens for segment in segments] + [num_fillers]
    ids_PK, logprobs_PK = _support([one.scores for one in scored])
    return MicroBatch(
        tokens_T=_join([*(_ids(one) for one in segments), np.zeros(num_fillers)], torch.int64),
        positions_T=_join([np.arange(length) for length in lengths], torch.int64),
        bounds=_join([np.cumsum([0, *(length for length in lengths if length)])], torch.int32),
        longest=max(lengths),
        rows_P=_join(_rows(segments) if num_positions else [np.zeros(1)], torch.int64),
        targets_P=_join([_ids(one.segment)[_indices(one.segment)] for one in scored], torch.int64),
        weights_P=_on_device(weights_P),
        teacher_ids_PK=None if ids_PK is None else _join([ids_PK], torch.int64),
        teacher_logprobs_PK=_join([logprobs_PK], torch.float32),
        teacher_sampled_P=_join(
            [_floats(one.scores.sampled_logprobs) for one in scored], torch.float32
        ),
        sampler_logprobs_P=_join([_sampled(one.segment) for one in scored], torch.float32),
        num_tokens=num_tokens,
        num_positions=num_positions,
    )


def _rows(segments: Sequence[Segment]) -> list[np.ndarray]:
    starts = accumulate((segment.num_tokens for segment in segments), initial=0)
    return [start + _indices(segment) - 1 for segment, start in zip(segments, starts, strict=False)]


def _support(scores: Sequence[TeacherScores]) -> tuple[np.ndarray | None, np.ndarray]:
    """Return the teacher's ids [P, K] (None: all of the vocabulary) and log-probabilities."""
    scores = [one for one in scores if one.num_positions]
    size = max(one.support_size for one in scores)
    logprobs_PK = np.concatenate(
        [_cells(one, one.logprobs, "<f4", size, -np.inf) for one in scores]
    )
    if any(not one.token_ids for one in scores):
        return None, logprobs_PK
    # An id whose log-probability is -inf may be anything.
    return np.concatenate(
        [_cells(one, one.token_ids, "<i4", size, 0) for one in scores]
    ), logprobs_PK


def _cells(scores: TeacherScores, data: bytes, dtype: str, size: int, fill: float) -> np.ndarray:
    """Return [P, K] values, filled up to ``size`` columns."""
    cells = np.frombuffer(data, dtype).reshape(scores.num_positions, scores.support_size)
    padded: np.ndarray = np.full((scores.num_positions, size), fill, dtype)
    padded[:, : scores.support_size] = cells
    return padded


def _ids(segment: Segment) -> np.ndarray:
    return np.frombuffer(segment.token_ids, "<i4")


def _indices(segment: Segment) -> np.ndarray:
    return np.flatnonzero(np.frombuffer(segment.loss_mask, np.uint8))


def _sampled(segment: Segment) -> np.ndarray:
    if segment.sampler_logprobs:
        known: np.ndarray = _floats(segment.sampler_logprobs)[_indices(segment)]
        return known
    return np.full(segment.num_supervised, np.nan)


def _floats(data: bytes) -> np.ndarray:
    return np.frombuffer(data, "<f4")


def _filler(num_vocab: int | None) -> ScoredSegment:
    """Return the position that a micro-batch may lack; the teacher does not cover it.

    ``num_vocab`` is None where the teacher gives its top k only.
    """
    size = num_vocab or 1
    return ScoredSegment(
        segment=Segment(
            token_ids=np.zeros(2, "<i4").tobytes(),
            loss_mask=bytes((0, 1)),
            sampler_logprobs=b"",
            spans=(VersionSpan(policy_version=PolicyVersion(0), num_tokens=1),),
        ),
        scores=TeacherScores(
            num_positions=1,
            support_size=size,
            token_ids=b"" if num_vocab else np.zeros(1, "<i4").tobytes(),
            logprobs=np.full(size, -np.inf, "<f4").tobytes(),
            sampled_logprobs=np.zeros(1, "<f4").tobytes(),
            tail_mass=np.ones(1, "<f4").tobytes(),
        ),
    )


def _join(parts: Sequence[np.ndarray], dtype: torch.dtype) -> Tensor:
    # A copy: the payload's bytes are read-only, which a tensor cannot be.
    return _on_device(torch.tensor(np.concatenate(parts), dtype=dtype))


def _on_device(tensor: Tensor) -> Tensor:
    return tensor.cuda() if torch.cuda.is_available() else tensor
