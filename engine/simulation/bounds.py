"""What no schedule can exceed, from the same speeds and the same lengths as were simulated.

A stage: what it could do with all others always ahead of it. The lag: samples drawn when version
v is published are trained by step v + max_policy_lag, so a step waits for the longest replies among
those, if for nothing else. How much of one step's wait the next ones make good is followed draw by
draw, with every reply decoded as if it were alone, and every batch of the mean number of tokens.
All hold in the long run: a store filled before can help a few steps beyond.
"""

import itertools
import math
from bisect import insort
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
    """What ``pipeline.max_policy_lag`` allows, with no reply slowed by another."""

    @property
    def together(self) -> float:
        """What the job cannot exceed."""
        return min(self.student, self.teacher, self.trainer, self.lag)


def settled_steps(spec: JobSpec) -> tuple[int, int]:
    """Return the first step that rates are taken over, and that behind the last.

    Before the one the pipeline fills, behind the other it empties.
    """
    lag = spec.pipeline.max_policy_lag
    return lag + 1, spec.pipeline.num_steps - lag


def bounds(spec: JobSpec, replies: Sequence[int]) -> Bounds:
    """Return the bounds for replies of these lengths, in tokens."""
    pipeline = spec.pipeline
    scores_s = (
        score_s(spec.simulation, num_tokens=spec.simulation.prompt_tokens + length)
        for length in replies
    )
    return Bounds(
        student=_best_tokens_per_s(spec, pipeline.slots) / fmean(replies),
        teacher=spec.teachers[0].replicas / fmean(scores_s),
        trainer=_rate(pipeline.samples_per_step, _step_s(spec, replies)),
        lag=_lag(spec, replies),
    )


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else math.inf


def _step_s(spec: JobSpec, replies: Sequence[int]) -> float:
    tokens = spec.pipeline.samples_per_step * (spec.simulation.prompt_tokens + fmean(replies))
    even_tokens = tokens / spec.trainer.parallel.data
    return train_s(spec.simulation, rank_tokens=even_tokens) + spec.simulation.export_s


def _best_tokens_per_s(spec: JobSpec, num_sequences: int) -> float:
    """Return what all replicas decode together with so many sequences spread over them."""
    simulation = spec.simulation
    num_active = min(spec.student.max_num_seqs, num_sequences / spec.student.replicas)
    step_s = simulation.decode_step_s + simulation.decode_sequence_s * num_active
    return spec.student.replicas * num_active / step_s


def _lag(spec: JobSpec, replies: Sequence[int]) -> float:
    size, lag = spec.pipeline.samples_per_step, spec.pipeline.max_policy_lag
    simulation = spec.simulation
    durations_s = iter([_alone_s(spec, length) for length in replies])
    step_s = _step_s(spec, replies) - simulation.export_s
    finished_s: list[float] = []
    """When each sample drawn so far is scored; in order."""
    due_s: list[float] = []
    """When all samples due by each step are."""
    end_s: list[float] = []
    """Of each step."""
    published_s = 0.0
    for step in range(len(replies) // size):
        num_drawn = spec.pipeline.slots if step == 0 else size
        drawn_s = [published_s + s for s in itertools.islice(durations_s, num_drawn)]
        due_s.append(max(drawn_s, default=0.0))
        for sample_s in drawn_s:
            insort(finished_s, sample_s)
        ready_s = finished_s[size * (step + 1) - 1]
        if step >= lag:
            ready_s = max(ready_s, due_s[step - lag])
        if lag == 0:  # nothing overlaps, and all decode at once
            batch = replies[size * step : size * (step + 1)]
            ready_s = max(ready_s, published_s + sum(batch) / _best_tokens_per_s(spec, size))
        trainer_free_s = end_s[-1] + simulation.export_s if end_s else 0.0
        end_s.append(max(ready_s, trainer_free_s) + step_s)
        published_s = end_s[-1] + simulation.export_s + simulation.update_s
    first, behind = settled_steps(spec)
    return size * (behind - first) / (end_s[behind - 1] - end_s[first - 1])


def _alone_s(spec: JobSpec, num_tokens: int) -> float:
    simulation = spec.simulation
    decode_s = num_tokens * (simulation.decode_step_s + simulation.decode_sequence_s)
    return decode_s + score_s(simulation, num_tokens=simulation.prompt_tokens + num_tokens)
