"""How often one sample may suffer from faults of the machinery.

Apart from ``rollout.max_attempts``, which pays for faults of the sample: what a lost replica did
not finish is done again elsewhere, from where it stopped.
"""

import asyncio
from collections import Counter

from opdkit.engine.stage_watch import StageWatch
from opdkit.protocols.errors import InfrastructureError, OpdkitError

MAX_INFRASTRUCTURE_ERRORS = 8
"""That one sample survives. With the delays below they outlast 16 s without a replica."""
FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 5.0


class SampleGivenUp(OpdkitError):
    """The machinery fails this sample again and again, while it serves others."""

    def __init__(self, error: InfrastructureError) -> None:
        super().__init__(str(error))
        self.error = error


class InfrastructureBudget:
    """The infrastructure errors that one sample has left."""

    def __init__(self, *, first_delay_s: float, counters: Counter[str]) -> None:
        self._delay_s = first_delay_s
        self._counters = counters
        self._num_left = MAX_INFRASTRUCTURE_ERRORS
        self._num_served_before: dict[StageWatch, int] = {}

    async def spend(self, error: InfrastructureError, stage: StageWatch) -> None:
        """Wait before another try.

        Raises:
            SampleGivenUp: nothing is left, and the stage served others meanwhile: it is this
                sample that it cannot serve.
            InfrastructureError: nothing is left, and the stage served nobody.
        """
        num_served_before = self._num_served_before.setdefault(stage, stage.num_served)
        if not self._num_left:
            if stage.num_served > num_served_before:
                raise SampleGivenUp(error) from error
            raise error
        self._num_left -= 1
        self._counters["infrastructure_retries"] += 1
        delay_s, self._delay_s = self._delay_s, min(2 * self._delay_s, LONGEST_DELAY_S)
        await asyncio.sleep(delay_s)
