"""A second chance within the same reply: a wrong answer is followed by a tip, and goes on."""

from collections.abc import Mapping
from typing import Any

from opdkit.engine.scheduling.answers import is_right
from opdkit.engine.scheduling.contract import Choice, RolloutRequest, Scheduler
from opdkit.protocols.errors import ConfigError


class MathTips(Scheduler):
    """Stops if the answer is right, else adds the tip, with mask 0, for the student to go on from.

    Where the reply ended with an end-of-sequence id, what follows the tip is a training segment of
    its own: the student sampled that id, but does not see it when it goes on.
    """

    def __init__(
        self,
        *,
        tip: str = "\nWait, that is not right. Let me go through it again.\n",
        max_tips: int = 1,
        solution_column: str = "solution",
    ) -> None:
        if max_tips < 1:
            raise ConfigError(
                f"rollout.scheduler_options.max_tips is {max_tips}, but must be at least 1"
            )
        if not tip:
            raise ConfigError("rollout.scheduler_options.tip is empty")
        self.max_turns = max_tips + 1
        self._tip = tip
        self._solution_column = solution_column

    async def check_finished(self, request: RolloutRequest, choice: Choice, turn: int) -> bool:
        """Stop at a right answer, or where a reply was cut."""
        solution = str(request.data_dict[self._solution_column])
        return choice.finish_reason == "length" or is_right(choice.message.content, solution)

    async def step(self, request: RolloutRequest, choice: Choice, turn: int) -> Mapping[str, Any]:
        """Add the tip to the assistant's message."""
        request.messages[-1]["content"] += self._tip
        return {"infer_request": request}
