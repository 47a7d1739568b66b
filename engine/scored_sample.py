"""From recorded segments and teacher scores to the payload of a queue item."""

from collections.abc import Sequence

import msgspec
import numpy as np

from opdkit.protocols.errors import NonFiniteScoresError, TeacherAlignmentError
from opdkit.protocols.messages import Sample, ScoredSegment, ScoreRequest, Segment, TeacherScores


def score_request(segment: Segment, *, sample_id: str) -> ScoreRequest:
    """Ask for the teacher's distribution at every token with mask 1."""
    positions = np.flatnonzero(np.frombuffer(segment.loss_mask, np.uint8)).astype("<i4")
    return ScoreRequest(
        sample_id=sample_id, token_ids=segment.token_ids, positions=positions.tobytes()
    )


def encode_sample(sample_id: str, scored: Sequence[tuple[Segment, TeacherScores]]) -> bytes:
    """Check the scores and return the msgpack form of a ``Sample``. Takes milliseconds.

    Raises:
        TeacherAlignmentError: scores of another number of positions.
        NonFiniteScoresError: NaN or positive infinity; minus infinity is a probability of 0.
    """
    segments: list[ScoredSegment] = []
    for segment, scores in scored:
        if scores.num_positions != segment.num_supervised:
            raise TeacherAlignmentError(
                f"sample {sample_id}: the teacher scored {scores.num_positions} positions, "
                f"{segment.num_supervised} were asked for"
            )
        for field in ("logprobs", "sampled_logprobs", "tail_mass"):
            # NaN compares false with everything.
            if not (np.frombuffer(getattr(scores, field), "<f4") < np.inf).all():
                raise NonFiniteScoresError(
                    f"sample {sample_id}: the teacher's {field} hold NaN or positive infinity"
                )
        segments.append(ScoredSegment(segment=segment, scores=scores))
    return msgspec.msgpack.encode(Sample(sample_id=sample_id, segments=tuple(segments)))
