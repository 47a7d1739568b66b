"""A second chance for a thinking model: a tip by the user, and the earlier thinking forgotten."""

import re
from collections.abc import Mapping
from typing import Any

from opdkit.engine.scheduling.contract import Choice, RolloutRequest
from opdkit.engine.scheduling.math_tips import MathTips

_THINKING = re.compile(r".*</think>\s*", re.DOTALL)


class ThinkingTips(MathTips):
    """Like ``MathTips``, with the tip as a user message after an answer without its thinking.

    A history without the thinking that was sampled is no continuation of it, so each turn trains
    as a segment of its own.
    """

    def __init__(
        self,
        *,
        tip: str = "That is not right. Think again, and check each step.",
        max_tips: int = 1,
        solution_column: str = "solution",
    ) -> None:
        super().__init__(tip=tip, max_tips=max_tips, solution_column=solution_column)

    async def step(self, request: RolloutRequest, choice: Choice, turn: int) -> Mapping[str, Any]:
        """Forget the thinking and ask again."""
        reply = request.messages[-1]
        reply["content"] = _THINKING.sub("", reply["content"])
        request.messages.append({"role": "user", "content": self._tip})
        return {"infer_request": request}
