"""From a drawn ordinal to a rollout's task, or to the dead letter of a row that can be none."""

from opdkit.protocols.errors import PromptError
from opdkit.protocols.ids import Ordinal
from opdkit.protocols.messages import DeadSample, RolloutTask
from opdkit.protocols.roles import PromptSource

SEEDS_PER_RUN = 1_000_003
"""Distance between the sampling seeds of two runs, above any run's number of samples alive."""


def make_task(
    prompts: PromptSource,
    ordinal: Ordinal,
    *,
    due_step: int,
    seed: int,
    name: str = "sample",
    held_out: bool = False,
) -> RolloutTask:
    """Return the task of the row at this place in the data.

    Raises:
        PromptError: the row is no usable prompt.
    """
    prompt_id, row = prompts.row(ordinal)
    return RolloutTask(
        sample_id=f"{name}-{ordinal}",
        ordinal=ordinal,
        due_step=due_step,
        prompt_id=prompt_id,
        row=row,
        seed=seed * SEEDS_PER_RUN + ordinal,
        held_out=held_out,
    )


def dead_prompt(ordinal: Ordinal, error: PromptError) -> DeadSample:
    """Return the dead letter of a row that never became a rollout."""
    return DeadSample(
        sample_id=f"sample-{ordinal}",
        ordinal=ordinal,
        prompt_id="",
        reason=type(error).__name__,
        message=str(error),
        traceback="",
        num_attempts=0,
        num_generated_tokens=0,
    )
