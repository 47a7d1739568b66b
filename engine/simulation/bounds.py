"""What no schedule can exceed, from the same speeds and the same lengths as were simulated.

A stage: what it could do with all others always ahead of it. The lag: samples drawn when version
v is published are trained by step v + max_policy_lag, so that version v + max_policy_lag + 1 comes
no earlier than the longest of their replies, that step and its publication allow.
"""

from collections.abc import Sequence
from statistics import fmean

from opdkit.engine.simulation.parts import score_s, train_s
from opdkit.protocols.config import JobSpec
from opdkit.protocols.messages import Message


class Bounds(Message, frozen=True, kw_only=True):
    """Samples per second."""

    student: float
    """With as many sequences active as slots and replicas allow, and no update."""
    teacher: float
    trainer: float
    """Steps and exports, with the batches cut evenly over the data-parallel ranks."""
    lag: float
    """What ``pipeline.max_policy_lag`` allows, with the longest reply of a batch never slowed."""

    @property
    def together(self) -> float:
        """What the job cannot exceed."""
        return min(self.student, self.teacher, self.trainer, self.lag)


def bounds(spec: JobSpec, replies: Sequence[int]) -> Bounds:
    """Return the bounds for replies of these lengths, in tokens."""
    pipeline = spec.pipeline
    scores_s = (
        score_s(spec.simulation, num_tokens=spec.simulation.prompt_tokens + length)
        for length in replies
    )
    return Bounds(
        student=_student(spec, replies),
        teacher=spec.teachers[0].replicas / fmean(scores_s),
        trainer=pipeline.samples_per_step / _step_s(spec, replies),
        lag=pipeline.slots / _lag_s(spec, replies),
    )


def _step_s(spec: JobSpec, replies: Sequence[int]) -> float:
    tokens = spec.pipeline.samples_per_step * (spec.simulation.prompt_tokens + fmean(replies))
    even_tokens = tokens / spec.trainer.parallel.data
    return train_s(spec.simulation, rank_tokens=even_tokens) + spec.simulation.export_s


def _student(spec: JobSpec, replies: Sequence[int]) -> float:
    num_active = min(spec.student.max_num_seqs, spec.pipeline.slots / spec.student.replicas)
    return spec.student.replicas * _tokens_per_s(spec, num_active) / fmean(replies)


def _tokens_per_s(spec: JobSpec, num_active: float) -> float:
    simulation = spec.simulation
    return num_active / (simulation.decode_step_s + simulation.decode_sequence_s * num_active)


def _lag_s(spec: JobSpec, replies: Sequence[int]) -> float:
    """Return the least time from the publication of a version to that of the last that may use it.

    With a lag of 0 nothing overlaps, and a batch takes its tokens at the replicas' best rate too.
    """
    size = spec.pipeline.samples_per_step
    simulation = spec.simulation
    alone_s = simulation.decode_step_s + simulation.decode_sequence_s
    batches = [replies[first : first + size] for first in range(0, len(replies), size)]
    generate_s = [max(batch) * alone_s for batch in batches]
    if not spec.pipeline.max_policy_lag:
        num_active = min(spec.student.max_num_seqs, size / spec.student.replicas)
        rate = spec.student.replicas * _tokens_per_s(spec, num_active)
        in_all_s = (sum(batch) / rate for batch in batches)
        generate_s = [max(pair) for pair in zip(generate_s, in_all_s, strict=True)]
    return fmean(generate_s) + _step_s(spec, replies) + simulation.update_s
