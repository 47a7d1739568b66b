"""The sample queue's decisions: what may enter, what is leased, what is forgotten. No waiting.

Samples stand in the order of (due step, ordinal), inside and in front of the door. A sample
inside counts towards both bounds until it is acknowledged, leased or not.

**Overdraft.** While a lease waits, the first in front of the door may enter beyond the bounds if
the demand lacks it: else producer and consumer would wait for each other, as when leased samples
fill the queue. Each such entry lowers ``shortage`` by one, so a demand lets in at most ``count``.
It suffices to look at the first: if any one helps, the one due earliest does.

**Idempotence** is by ordinal, which a sample's id names, one to one: ids of samples inside are
compared, and of acknowledged ones only the ordinals are kept. These are exact for ever, at the
cost of one run of numbers for each gap that a dead sample leaves.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from opdkit.engine.batch_composition import shortage
from opdkit.engine.ordinal_set import OrdinalSet
from opdkit.protocols.ids import Ordinal
from opdkit.protocols.messages import Demand, SampleMeta


class Place(NamedTuple):
    """Order in which samples enter and leave."""

    due_step: int
    ordinal: Ordinal


class Ticket(NamedTuple):
    """A put in front of the door."""

    place: Place
    number: int
    """Tells apart two puts of one sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    meta: SampleMeta
    payload: bytes
    entered_s: float


class LeaseCore:
    """Samples in front of the door, ready and leased, and the demand for the next batch."""

    def __init__(self, *, max_samples: int, max_bytes: int) -> None:
        for name, bound in (("max_samples", max_samples), ("max_bytes", max_bytes)):
            if bound < 1:
                raise ValueError(f"{name} must be at least 1, got {bound}")
        self._max_samples = max_samples
        self._max_bytes = max_bytes
        self._parked: list[Ticket] = []  # ascending
        self._parked_puts: dict[Ticket, tuple[SampleMeta, bytes]] = {}
        self._num_tickets = 0
        self._inside: dict[Ordinal, _Entry] = {}
        self._ready: list[Place] = []  # ascending
        self._ordinals: dict[str, Ordinal] = {}
        """Of the samples inside, by sample id."""
        self._leased: set[Ordinal] = set()
        self._acknowledged = OrdinalSet()
        self._num_bytes = 0
        self.demand = Demand(count=0)

    @property
    def num_samples(self) -> int:
        """Samples inside."""
        return len(self._inside)

    @property
    def num_bytes(self) -> int:
        """Payload inside."""
        return self._num_bytes

    @property
    def num_leased(self) -> int:
        """Samples inside that are leased."""
        return len(self._leased)

    @property
    def num_parked(self) -> int:
        """Puts in front of the door."""
        return len(self._parked)

    @property
    def first_parked(self) -> Ticket | None:
        """The put whose turn it is."""
        return self._parked[0] if self._parked else None

    def oldest_entered_s(self) -> float | None:
        """Return when the sample that is inside longest entered; None: none is inside."""
        return min((entry.entered_s for entry in self._inside.values()), default=None)

    def park(self, meta: SampleMeta, payload: bytes) -> Ticket:
        """Stand in front of the door.

        Raises:
            ValueError: the ordinal is inside under another sample id.
        """
        inside = self._inside.get(meta.ordinal)
        if inside and inside.meta.sample_id != meta.sample_id:
            raise ValueError(
                f"sample {meta.sample_id!r} has ordinal {meta.ordinal}, "
                f"under which {inside.meta.sample_id!r} is queued"
            )
        ticket = Ticket(Place(meta.due_step, meta.ordinal), self._num_tickets)
        self._num_tickets += 1
        insort(self._parked, ticket)
        self._parked_puts[ticket] = (meta, payload)
        return ticket

    def unpark(self, ticket: Ticket) -> None:
        """Leave the place in front of the door."""
        del self._parked[bisect_left(self._parked, ticket)]
        del self._parked_puts[ticket]

    def is_known(self, ticket: Ticket) -> bool:
        """Say whether this sample entered before."""
        ordinal = ticket.place.ordinal
        return ordinal in self._inside or ordinal in self._acknowledged

    def can_enter(self, ticket: Ticket, *, lease_waits: bool) -> bool:
        """Say whether it is this put's turn and there is room, or need, for its sample."""
        if ticket != self._parked[0]:
            return False
        num_bytes = self._num_bytes + len(self._parked_puts[ticket][1])
        has_room = self.num_samples < self._max_samples and num_bytes <= self._max_bytes
        return has_room or not self._inside or (lease_waits and self._lacks(ticket.place))

    def _lacks(self, place: Place) -> bool:
        due_steps = [ready.due_step for ready in self._ready]
        missing = shortage(self.demand, due_steps)
        insort(due_steps, place.due_step)
        return shortage(self.demand, due_steps) < missing

    def enter(self, ticket: Ticket, *, now_s: float) -> None:
        """Move the sample of a parked put inside. The ticket stays, to be unparked."""
        meta, payload = self._parked_puts[ticket]
        self._inside[meta.ordinal] = _Entry(meta=meta, payload=payload, entered_s=now_s)
        self._ordinals[meta.sample_id] = meta.ordinal
        self._num_bytes += len(payload)
        insort(self._ready, ticket.place)

    def can_lease(self) -> bool:
        """Say whether what is ready meets the demand. Nothing always meets a demand of 0."""
        return not shortage(self.demand, [ready.due_step for ready in self._ready])

    def lease(self) -> list[SampleMeta]:
        """Lease the batch, earliest due first. The demand stands until another is stated."""
        batch = [self._inside[place.ordinal].meta for place in self._ready[: self.demand.count]]
        del self._ready[: self.demand.count]
        self._leased.update(meta.ordinal for meta in batch)
        return batch

    def payloads(self, sample_ids: Sequence[str]) -> list[bytes]:
        """Return the payloads of leased samples, in the order asked.

        Raises:
            ValueError: one of them is not leased.
        """
        return [self._inside[self._leased_ordinal(name)].payload for name in sample_ids]

    def _leased_ordinal(self, sample_id: str) -> Ordinal:
        ordinal = self._ordinals.get(sample_id)
        if ordinal is None or ordinal not in self._leased:
            raise ValueError(f"sample {sample_id!r} is not leased")
        return ordinal

    def acknowledge(self, sample_ids: Sequence[str]) -> None:
        """Forget leased samples, but for their ordinals. Once more changes nothing.

        Raises:
            ValueError: one of them is inside, but not leased; nothing is changed.
        """
        inside = [name for name in dict.fromkeys(sample_ids) if name in self._ordinals]
        for sample_id, ordinal in [(name, self._leased_ordinal(name)) for name in inside]:
            self._num_bytes -= len(self._inside.pop(ordinal).payload)
            del self._ordinals[sample_id]
            self._leased.remove(ordinal)
            self._acknowledged.add(ordinal)

    def return_leases(self) -> None:
        """Make every leased sample ready again, in its old place."""
        for ordinal in self._leased:
            insort(self._ready, Place(self._inside[ordinal].meta.due_step, ordinal))
        self._leased.clear()
