"""Messages for tests, complete but for what the test says."""

from collections.abc import Sequence

from opdkit.protocols.ids import Ordinal, PolicyVersion
from opdkit.protocols.messages import (
    DeadSample,
    SampleMeta,
    SegmentShape,
    StepPlan,
    StepReport,
)

PROMPT_TOKENS = 3


def make_meta(
    ordinal: int,
    *,
    due_step: int = 0,
    policy_version: int = 0,
    segments: Sequence[tuple[int, int]] = ((PROMPT_TOKENS + 2, 2),),
    num_wasted_tokens: int = 0,
    generate_s: float = 0.0,
    score_s: float = 0.0,
) -> SampleMeta:
    """Return a sample with segments of (tokens, supervised tokens), all of one version."""
    shapes = tuple(SegmentShape(num_tokens=n, num_supervised=p) for n, p in segments)
    return SampleMeta(
        sample_id=f"sample-{ordinal}",
        ordinal=Ordinal(ordinal),
        due_step=due_step,
        segments=shapes,
        oldest_version=PolicyVersion(policy_version),
        num_generated_tokens=sum(shape.num_supervised for shape in shapes),
        num_wasted_tokens=num_wasted_tokens,
        num_bytes=sum(shape.num_tokens for shape in shapes),
        num_turns=1,
        finish_reason="stop",
        generate_s=generate_s,
        score_s=score_s,
    )


def make_dead(ordinal: int, *, num_generated_tokens: int = 0) -> DeadSample:
    """Return a dead letter."""
    return DeadSample(
        sample_id=f"sample-{ordinal}",
        ordinal=Ordinal(ordinal),
        prompt_id=f"prompt-{ordinal}",
        reason="HookError",
        message="scripted",
        traceback="",
        num_attempts=1,
        num_generated_tokens=num_generated_tokens,
    )


def planned_samples(plan: StepPlan) -> list[str]:
    """Return the ids of a plan's samples, each once."""
    segments = (ref for rank in plan.microbatches for batch in rank for ref in batch)
    return list(dict.fromkeys(ref.sample_id for ref in segments))


def make_report(plan: StepPlan) -> StepReport:
    """Return the report of a step that went as planned."""
    segments = [ref for rank in plan.microbatches for batch in rank for ref in batch]
    return StepReport(
        step=plan.step,
        loss=1.0 / (1 + plan.step),
        grad_norm=1.0,
        learning_rate=1e-4,
        num_tokens=sum(ref.num_tokens for ref in segments),
        num_supervised=plan.num_supervised,
        num_uncovered=0,
        reverse_kl_estimate=1.0 / (1 + plan.step),
        sampler_gap=0.0,
        student_mass=1.0,
        num_microbatches=len(plan.microbatches[0]),
        step_s=0.0,
        fetch_s=0.0,
    )
