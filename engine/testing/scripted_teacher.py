"""A teacher that likes everything equally well."""

import asyncio
from array import array
from collections.abc import Sequence

import numpy as np

from opdkit.protocols.messages import ScoreRequest, TeacherScores


class ScriptedTeacher:
    """A ``TeacherScorer`` whose support is the sampled token alone."""

    def __init__(
        self,
        *,
        logprob: float = -1.0,
        delay_s: float = 0.0,
        errors: Sequence[Exception | None] = (),
        hangs: bool = False,
        num_extra_positions: int = 0,
    ) -> None:
        """Script the teacher.

        Args:
            logprob: Of every token, in nats.
            delay_s: Of every call.
            errors: Raised by the first calls, one each; None: that call succeeds.
            hangs: Never answer.
            num_extra_positions: Positions scored that nobody asked for.
        """
        self._logprob = logprob
        self._delay_s = delay_s
        self._errors = list(errors)
        self._hangs = hangs
        self._num_extra_positions = num_extra_positions
        self.requests: list[ScoreRequest] = []
        self.asked = asyncio.Event()
        """Set by the first request."""
        self.num_open = 0
        """Calls in progress."""

    async def score(self, request: ScoreRequest) -> TeacherScores:
        """Answer, or do what the script says."""
        self.requests.append(request)
        self.asked.set()
        self.num_open += 1
        try:
            await asyncio.sleep(self._delay_s)
            if self._hangs:
                await asyncio.Event().wait()
        finally:
            self.num_open -= 1
        error = self._errors.pop(0) if self._errors else None
        if error is not None:
            raise error
        positions = np.frombuffer(request.positions, "<i4")
        sampled = np.frombuffer(request.token_ids, "<i4")[positions]
        count = len(positions) + self._num_extra_positions
        logprobs = array("f", [self._logprob] * count).tobytes()
        return TeacherScores(
            num_positions=count,
            support_size=1,
            token_ids=np.resize(sampled, count).tobytes(),
            logprobs=logprobs,
            sampled_logprobs=logprobs,
            tail_mass=bytes(4 * count),
        )
