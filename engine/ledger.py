"""What became of every prompt drawn: the one place that knows, and the slots that bound it.

A sample goes rolling → queued → leased → trained → released, or dies while rolling. It holds a
slot from its draw until it is released or dead. Plain bookkeeping without a loop: the run loop
calls it, one call after another, and waits elsewhere.
"""

from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import NoReturn

from opdkit.engine.balance import Balance
from opdkit.engine.ordinal_set import OrdinalSet
from opdkit.protocols.ids import Ordinal, PolicyVersion
from opdkit.protocols.messages import DeadSample, Message, SampleMeta


class LedgerState(Message, frozen=True, kw_only=True):
    """What a checkpoint keeps of a ledger. All else is drawn again after a restore."""

    frontier: int
    """Lowest ordinal that had not ended."""
    ended_beyond: tuple[int, ...]
    """Ordinals above the frontier that had ended, ascending."""
    next_ordinal: int
    """The first ordinal never drawn."""
    num_trained: int
    num_dead: int
    num_trained_tokens: int
    num_dead_tokens: int

    def __post_init__(self) -> None:
        """Reject counts that do not add up."""
        num_ended = self.frontier + len(self.ended_beyond)
        if num_ended != self.num_trained + self.num_dead:
            raise ValueError(
                f"LedgerState lists {num_ended} ended ordinals, but counts {self.num_trained} "
                f"trained and {self.num_dead} dead"
            )


class _State(StrEnum):
    ROLLING = "rolling"
    QUEUED = "queued"
    LEASED = "leased"
    TRAINED = "trained"


@dataclass(slots=True, kw_only=True)
class _Entry:
    """A sample that holds a slot."""

    due_step: int
    state: _State = _State.ROLLING
    num_tokens: int = 0
    """Generated in the attempt that succeeded; 0 while rolling."""
    step: int = -1
    """That trained it; -1 before."""


class Ledger:
    """Every ordinal drawn and its state, with at most ``slots`` of them unpublished."""

    def __init__(
        self, *, slots: int, max_policy_lag: int, resumed: LedgerState | None = None
    ) -> None:
        """Start empty, or from a checkpoint: what had not ended there will be drawn first."""
        if slots < 1:
            raise ValueError(f"slots must be at least 1, got {slots}")
        if max_policy_lag < 0:
            raise ValueError(f"max_policy_lag must be at least 0, got {max_policy_lag}")
        self._slots = slots
        self._max_policy_lag = max_policy_lag
        self._held: dict[Ordinal, _Entry] = {}
        self._published_version = 0
        self._ended = OrdinalSet(frontier=resumed.frontier if resumed else 0)
        self._unfinished: deque[Ordinal] = deque()
        self._next_new = self._num_drawn = 0
        self._num_trained = self._num_dead = 0
        self._num_trained_tokens = self._num_dead_tokens = 0
        if resumed:
            self._resume(resumed)
        self._num_generated_tokens = self._num_trained_tokens + self._num_dead_tokens
        self._num_tokens_before = self._num_generated_tokens

    def _resume(self, state: LedgerState) -> None:
        for ordinal in state.ended_beyond:
            self._ended.add(Ordinal(ordinal))
        not_new = map(Ordinal, range(state.frontier, state.next_ordinal))
        self._unfinished.extend(ordinal for ordinal in not_new if ordinal not in self._ended)
        self._next_new = state.next_ordinal
        self._num_drawn = state.num_trained + state.num_dead
        self._num_trained, self._num_dead = state.num_trained, state.num_dead
        self._num_trained_tokens = state.num_trained_tokens
        self._num_dead_tokens = state.num_dead_tokens

    @property
    def next_ordinal(self) -> Ordinal:
        """What ``draw`` would return."""
        return self._unfinished[0] if self._unfinished else Ordinal(self._next_new)

    @property
    def num_held(self) -> int:
        """Slots held."""
        return len(self._held)

    @property
    def num_alive(self) -> int:
        """Samples that roll, are queued or leased."""
        return sum(entry.state is not _State.TRAINED for entry in self._held.values())

    @property
    def num_queued(self) -> int:
        """Samples that wait for their step."""
        return sum(entry.state is _State.QUEUED for entry in self._held.values())

    @property
    def num_trained(self) -> int:
        """Samples trained, published or not."""
        return self._num_trained

    @property
    def num_dead(self) -> int:
        """Samples given up."""
        return self._num_dead

    def can_draw(self) -> bool:
        """Say whether a slot is free."""
        return len(self._held) < self._slots

    def draw(self, *, policy_version: PolicyVersion) -> Ordinal:
        """Take a slot for the lowest unfinished ordinal of a resumed run, or else for a new one.

        Args:
            policy_version: the one published now; it sets the due step.
        """
        if not self.can_draw():
            raise ValueError(f"all {self._slots} slots are held")
        ordinal = self.next_ordinal
        if self._unfinished:
            self._unfinished.popleft()
        else:
            self._next_new += 1
        self._num_drawn += 1
        self._held[ordinal] = _Entry(due_step=policy_version + self._max_policy_lag)
        return ordinal

    def due_step(self, ordinal: Ordinal) -> int:
        """Return the last step that may train a sample which holds a slot."""
        return self._held[ordinal].due_step

    def alive_by_due(self) -> Counter[int]:
        """Count the samples that roll or are queued, by due step."""
        alive = (_State.ROLLING, _State.QUEUED)
        return Counter(entry.due_step for entry in self._held.values() if entry.state in alive)

    def queue(self, meta: SampleMeta) -> None:
        """Record a finished sample. Once more changes nothing.

        Both its runner's answer and its lease announce it, in either order.
        """
        entry = self._held.get(meta.ordinal)
        if entry is None:
            if meta.ordinal not in self._ended:
                _refuse(meta.ordinal, "queued", "not drawn")
            return
        if entry.state is not _State.ROLLING:
            return
        entry.state = _State.QUEUED
        entry.num_tokens = meta.num_generated_tokens
        self._num_dead_tokens += meta.num_wasted_tokens
        self._num_generated_tokens += meta.num_generated_tokens + meta.num_wasted_tokens

    def lease(self, ordinals: Collection[Ordinal]) -> None:
        """Record that queued samples were handed to the trainer."""
        for entry in self._all_in(_State.QUEUED, ordinals, "leased"):
            entry.state = _State.LEASED

    def return_leases(self) -> None:
        """Record that every leased sample is back in the queue."""
        for entry in self._held.values():
            if entry.state is _State.LEASED:
                entry.state = _State.QUEUED

    def train(self, ordinals: Collection[Ordinal], *, step: int) -> None:
        """Record that step ``step`` trained on leased samples."""
        for entry in self._all_in(_State.LEASED, ordinals, "trained"):
            assert step <= entry.due_step, f"trained at step {step}, due by {entry.due_step}"
            entry.state = _State.TRAINED
            entry.step = step
            self._num_trained += 1
            self._num_trained_tokens += entry.num_tokens

    def publish(self, policy_version: PolicyVersion) -> None:
        """Release the slots of all samples that a step before this version trained."""
        if policy_version < self._published_version:
            raise ValueError(
                f"policy_version {policy_version} is below the published {self._published_version}"
            )
        self._published_version = policy_version
        for ordinal in self._trained_before(policy_version):
            del self._held[ordinal]
            self._ended.add(ordinal)

    def bury(self, dead: DeadSample) -> None:
        """Record that a rolling sample was given up, and free its slot."""
        self._all_in(_State.ROLLING, (dead.ordinal,), "buried")
        del self._held[dead.ordinal]
        self._ended.add(dead.ordinal)
        self._num_dead += 1
        self._num_dead_tokens += dead.num_generated_tokens
        self._num_generated_tokens += dead.num_generated_tokens

    def balance(
        self, *, num_rolling_tokens: int = 0, num_generated_tokens: int | None = None
    ) -> Balance:
        """Return both accounts.

        Args:
            num_rolling_tokens: sampled so far by trajectories that have not ended.
            num_generated_tokens: sampled since the run began or resumed, as the rollout workers
                counted them; None: as the samples themselves say, which finds less.
        """
        if num_generated_tokens is None:
            num_generated = self._num_generated_tokens + num_rolling_tokens
        else:
            num_generated = self._num_tokens_before + num_generated_tokens
        untrained = [e for e in self._held.values() if e.state is not _State.TRAINED]
        return Balance(
            num_drawn=self._num_drawn,
            num_alive=len(untrained),
            num_trained=self._num_trained,
            num_dead=self._num_dead,
            num_generated_tokens=num_generated,
            num_trained_tokens=self._num_trained_tokens,
            num_in_flight_tokens=num_rolling_tokens + sum(e.num_tokens for e in untrained),
            num_dead_tokens=self._num_dead_tokens,
        )

    def check(self) -> None:
        """Assert what must hold between any two calls."""
        balance = self.balance()
        assert balance.num_missing == 0, f"samples do not balance: {balance}"
        assert balance.num_missing_tokens == 0, f"tokens do not balance: {balance}"
        assert len(self._held) <= self._slots, f"{len(self._held)} of {self._slots} slots held"
        assert len(self._held) + len(self._ended) == self._num_drawn, "an ordinal is in no state"
        for due, count in self.alive_by_due().items():
            assert due >= self._published_version, f"{count} untrained samples were due by {due}"

    def snapshot(self, *, policy_version: PolicyVersion) -> LedgerState:
        """Return what a checkpoint of the weights of this version must keep.

        A sample trained by a later step counts as not trained: these weights do not know it.
        """
        if policy_version < self._published_version:
            raise ValueError(
                f"policy_version {policy_version} is below the published "
                f"{self._published_version}, whose samples are forgotten"
            )
        known = self._trained_before(policy_version)
        ended = OrdinalSet(frontier=self._ended.frontier)
        for ordinal in (*self._ended.beyond_frontier(), *known):
            ended.add(ordinal)
        num_unknown = num_unknown_tokens = 0
        for ordinal, entry in self._held.items():
            if entry.state is _State.TRAINED and ordinal not in ended:
                num_unknown += 1
                num_unknown_tokens += entry.num_tokens
        return LedgerState(
            frontier=ended.frontier,
            ended_beyond=tuple(ended.beyond_frontier()),
            next_ordinal=self._next_new,
            num_trained=self._num_trained - num_unknown,
            num_dead=self._num_dead,
            num_trained_tokens=self._num_trained_tokens - num_unknown_tokens,
            num_dead_tokens=self._num_dead_tokens,
        )

    def _trained_before(self, policy_version: PolicyVersion) -> list[Ordinal]:
        return [
            ordinal
            for ordinal, entry in self._held.items()
            if entry.state is _State.TRAINED and entry.step < policy_version
        ]

    def _all_in(self, state: _State, ordinals: Collection[Ordinal], deed: str) -> list[_Entry]:
        """Return the entries, or change nothing: all must be in this state."""
        for ordinal in ordinals:
            entry = self._held.get(ordinal)
            if entry is None or entry.state is not state:
                _refuse(ordinal, deed, f"{entry.state if entry else 'not held'}, not {state}")
        return [self._held[ordinal] for ordinal in ordinals]


def _refuse(ordinal: Ordinal, deed: str, reason: str) -> NoReturn:
    raise ValueError(f"ordinal {ordinal} cannot be {deed}: it is {reason}")
