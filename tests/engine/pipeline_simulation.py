"""A run in simulated time: the real ledger and composition rule, random durations.

Rollouts are lognormal with stragglers; a step is composed one ahead of the one that trains;
publication runs behind training, in order, and may take longer than a step.
"""

import heapq
import random
from collections import deque
from dataclasses import dataclass

from opdkit.engine.batch_composition import demand, shortage
from opdkit.engine.ledger import Ledger, LedgerState
from opdkit.engine.testing_messages import make_dead, make_meta
from opdkit.protocols.ids import Ordinal, PolicyVersion


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Sizes and paces."""

    samples_per_step: int = 4
    max_policy_lag: int = 1
    num_ordinals: int = 120
    num_wanted: int | None = None
    """Samples after which the job ends, the dead replaced; None: with the data."""
    step_s: float = 1.0
    publish_s: float = 0.3
    """Median; each is between half and three times it."""
    rollout_s: float = 1.5
    """Median."""
    dead_every: int = 0
    """One ordinal in so many dies; 0: none."""

    def dies(self, ordinal: int) -> bool:
        """Say whether this ordinal gives no sample, whenever it is drawn."""
        return bool(self.dead_every) and ordinal % self.dead_every == 0

    @property
    def slots(self) -> int:
        """Samples alive at once."""
        return (self.max_policy_lag + 1) * self.samples_per_step


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A ledger's state, and what the weights that go with it were trained on."""

    step: int
    state: LedgerState
    trained: list[Ordinal]


class Simulation:
    """One job from its start, or from a checkpoint."""

    def __init__(self, setting: Setting, *, seed: int, resumed: Checkpoint | None = None) -> None:
        self.setting = setting
        self.ledger = Ledger(
            slots=setting.slots,
            max_policy_lag=setting.max_policy_lag,
            resumed=resumed.state if resumed else None,
        )
        self.trained = list(resumed.trained) if resumed else []
        self.lags: list[int] = []
        self.batch_sizes: list[int] = []
        self.duration_s: dict[Ordinal, float] = {}
        self._rng = random.Random(seed)
        self._step = self._composed = self._published = resumed.step if resumed else 0
        self._finished: list[tuple[int, Ordinal]] = []  # queued, by due step
        self._batches: deque[list[Ordinal]] = deque()
        self._is_training = False
        self._drawn_at: dict[Ordinal, int] = {}
        self._now_s = self._publisher_free_s = 0.0
        self._events: list[tuple[float, int, str, Ordinal | int]] = []
        self._num_events = 0
        self._go_on()

    def run(self) -> None:
        """Go on until nothing is to happen any more."""
        while self.advance():
            pass

    def advance(self) -> bool:
        """Handle the next event; say whether there was one."""
        if not self._events:
            return False
        self._now_s, _, kind, subject = heapq.heappop(self._events)
        getattr(self, f"_{kind}")(subject)
        self.ledger.check()
        self._go_on()
        return True

    def checkpoint(self) -> Checkpoint:
        """Return what a save at this moment would keep."""
        version = PolicyVersion(self._step)
        state = self.ledger.snapshot(policy_version=version)
        return Checkpoint(step=self._step, state=state, trained=list(self.trained))

    def _after(self, delay_s: float, kind: str, subject: Ordinal | int) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (self._now_s + delay_s, self._num_events, kind, subject))

    def _has_data(self) -> bool:
        num_promised = self.ledger.num_alive + self.ledger.num_trained
        if self.setting.num_wanted is not None and num_promised >= self.setting.num_wanted:
            return False
        return self.ledger.next_ordinal < self.setting.num_ordinals

    def _go_on(self) -> None:
        while self._has_data() and self.ledger.can_draw():
            ordinal = self.ledger.draw(policy_version=PolicyVersion(self._published))
            self._drawn_at[ordinal] = self._published
            duration_s = self._rng.lognormvariate(0.0, 0.9) * self.setting.rollout_s
            self.duration_s[ordinal] = duration_s
            self._after(duration_s, "roll_ended", ordinal)
        while self._composed <= self._step + 1 and self._compose():
            pass
        if self._batches and not self._is_training:
            self._is_training = True
            self._after(self.setting.step_s * self._rng.uniform(0.5, 1.5), "trained_step", 0)

    def _compose(self) -> bool:
        wanted = demand(
            step=self._composed,
            alive_by_due=self.ledger.alive_by_due(),
            samples_per_step=self.setting.samples_per_step,
            max_policy_lag=self.setting.max_policy_lag,
            exhausted=not self._has_data(),
        )
        self._finished.sort()
        if not wanted.count or shortage(wanted, [due for due, _ in self._finished]):
            return False
        batch = [ordinal for _, ordinal in self._finished[: wanted.count]]
        del self._finished[: wanted.count]
        self.ledger.lease(batch)
        self._batches.append(batch)
        self._composed += 1
        return True

    def _roll_ended(self, ordinal: Ordinal) -> None:
        if self.setting.dies(ordinal):
            self.ledger.bury(make_dead(ordinal, num_generated_tokens=1))
            return
        due_step = self.ledger.due_step(ordinal)
        self.ledger.queue(make_meta(ordinal, due_step=due_step))
        self._finished.append((due_step, ordinal))

    def _trained_step(self, _: int) -> None:
        batch = self._batches.popleft()
        self.ledger.train(batch, step=self._step)
        self.trained += batch
        self.batch_sizes.append(len(batch))
        self.lags += [self._step - self._drawn_at[ordinal] for ordinal in batch]
        self._step += 1
        self._is_training = False
        publish_s = self.setting.publish_s * self._rng.choice([0.5, 1.0, 3.0])
        self._publisher_free_s = max(self._now_s, self._publisher_free_s) + publish_s
        self._after(self._publisher_free_s - self._now_s, "published_version", self._step)

    def _published_version(self, version: int) -> None:
        self._published = version
        self.ledger.publish(PolicyVersion(version))
