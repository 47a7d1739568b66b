"""How many samples a run still wants, and whether the data can give them."""

import math

from opdkit.engine.ledger import Ledger
from opdkit.protocols.config import JobSpec


class Goal:
    """The run's target against its ledger. Every answer is derived anew; nothing is stored."""

    def __init__(self, spec: JobSpec, ledger: Ledger, *, num_ordinals: int | None) -> None:
        pipeline = spec.pipeline
        self._ledger = ledger
        self._num_wanted = pipeline.num_steps * pipeline.samples_per_step
        self._num_ordinals = math.inf if num_ordinals is None else num_ordinals

    def can_draw(self) -> bool:
        """Say whether to draw a sample now: one is wanted, there is one, and a slot is free."""
        return not self.is_exhausted() and self._ledger.can_draw()

    def is_exhausted(self) -> bool:
        """Say whether nothing more will be drawn unless something dies."""
        return self._is_data_used_up() or (
            self._ledger.num_alive + self._ledger.num_trained >= self._num_wanted
        )

    def is_settled(self) -> bool:
        """Say whether nothing more will be drawn, whatever becomes of the samples alive."""
        return self._is_data_used_up() or self._ledger.num_trained >= self._num_wanted

    def _is_data_used_up(self) -> bool:
        return self._ledger.next_ordinal >= self._num_ordinals
