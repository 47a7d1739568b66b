"""How busy each stage was, and which one the run waits for.

Time with a request in flight does not tell who is slow: with hundreds of trajectories some request
is always in flight. The run loop's own time does: whatever it stands still for, bounds it.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from opdkit.protocols.messages import Message, StageMeter


class Stage(StrEnum):
    """What a run can wait for."""

    TRAINER = "trainer"
    STUDENT = "student"
    TEACHER = "teacher"
    TRANSFER = "transfer"
    """Payloads on their way from the queue to the ranks."""
    PUBLISHER = "publisher"


class StageRates(Message, frozen=True, kw_only=True):
    """Work of a stage per second of wall time."""

    busy_fraction: float
    """Share of the time with a request in flight, summed over workers."""
    requests_per_s: float
    prompt_tokens_per_s: float
    generated_tokens_per_s: float


class StepTiming(Message, frozen=True, kw_only=True):
    """What the run loop did between the end of one step and the end of the next."""

    batch_wait_s: float
    """Stood still until enough samples were finished."""
    fetch_s: float
    """Stood still until the ranks had the payloads."""
    train_s: float
    """Computed."""
    publish_wait_s: float
    """Stood still until the version before was published."""


def stage_rates(before: StageMeter, after: StageMeter, *, elapsed_s: float) -> StageRates:
    """Return the rates between two readings. A meter that ran backwards was restarted from 0."""
    if elapsed_s <= 0:
        raise ValueError(f"elapsed_s must be above 0, got {elapsed_s}")
    if after.num_requests < before.num_requests:
        before = StageMeter()
    return StageRates(
        busy_fraction=(after.busy_s - before.busy_s) / elapsed_s,
        requests_per_s=(after.num_requests - before.num_requests) / elapsed_s,
        prompt_tokens_per_s=(after.num_prompt_tokens - before.num_prompt_tokens) / elapsed_s,
        generated_tokens_per_s=(after.num_generated_tokens - before.num_generated_tokens)
        / elapsed_s,
    )


def time_by_stage(step: Mapping[str, Any]) -> dict[Stage, float]:
    """Put the run loop's time in one step down to the stages: computing, or standing still for one.

    A wait for samples is put down to the student or the teacher, whichever these samples spent
    more time in.

    Args:
        step: its record in ``metrics.jsonl``.

    Returns:
        Seconds. The trainer comes first, so that of equals it is the maximum: with it busy, nothing
        else is in the way.
    """
    is_teacher = step["score_s_mean"] > step["generate_s_mean"]
    return {
        Stage.TRAINER: step["train_s"],
        Stage.STUDENT: 0.0 if is_teacher else step["batch_wait_s"],
        Stage.TEACHER: step["batch_wait_s"] if is_teacher else 0.0,
        Stage.TRANSFER: step["fetch_s"],
        Stage.PUBLISHER: step["publish_wait_s"],
    }


def bounding_stage(step: Mapping[str, Any]) -> Stage:
    """Return the stage that a step spent most of its time on, or waiting for."""
    times_s = time_by_stage(step)
    return max(times_s, key=lambda stage: times_s[stage])
