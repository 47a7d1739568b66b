"""Bounded hand-off of finished samples from the rollouts to the trainer.

``put`` waits for room, ``lease`` for a batch that meets the demand; nothing else waits. What is
decided stands in lease_core.py; here is who waits and who wakes. Only the put in front and the
lease in front are woken, and only when they can go; each does its own deed after its wait and
then wakes the next. So a call cancelled while it waits has changed nothing, and whoever could go
instead is woken as it leaves.
"""

import asyncio
from collections.abc import Sequence

from opdkit.engine.lease_core import LeaseCore, Ticket
from opdkit.protocols.errors import QueueClosed
from opdkit.protocols.messages import Demand, Message, SampleMeta
from opdkit.protocols.roles import Clock


class QueueDepth(Message, frozen=True, kw_only=True, gc=False):
    """How full the queue is."""

    num_samples: int
    """Inside, leased ones included."""
    num_leased: int
    num_bytes: int
    """Payload of all inside."""
    num_held_puts: int
    """Producers that wait for room."""
    oldest_age_s: float
    """Since the sample inside longest entered; 0.0 if none is inside."""


class LeaseQueue:
    """A ``SampleQueue`` in this process; see that role for what its methods promise."""

    def __init__(self, *, max_samples: int, max_bytes: int, clock: Clock) -> None:
        """Bound the samples inside and their payload; leased ones count until acknowledged."""
        self._core = LeaseCore(max_samples=max_samples, max_bytes=max_bytes)
        self._clock = clock
        self._closed = False
        self._put_turns: dict[Ticket, asyncio.Event] = {}
        self._lease_turns: list[asyncio.Event] = []  # first come, first served

    @property
    def depth(self) -> QueueDepth:
        """How full the queue is now."""
        core = self._core
        oldest_s = core.oldest_entered_s()
        return QueueDepth(
            num_samples=core.num_samples,
            num_leased=core.num_leased,
            num_bytes=core.num_bytes,
            num_held_puts=core.num_parked,
            oldest_age_s=0.0 if oldest_s is None else self._clock.now() - oldest_s,
        )

    async def put(self, meta: SampleMeta, payload: bytes) -> None:
        """Hand over a sample, waiting for room. A second put of the same id changes nothing.

        Raises:
            QueueClosed: the queue was closed first.
            ValueError: another sample of this ordinal is inside.
        """
        ticket = self._core.park(meta, payload)
        turn = self._put_turns[ticket] = asyncio.Event()
        try:
            while not self._may_go(ticket):
                turn.clear()
                await turn.wait()
            if not self._core.is_known(ticket):
                self._core.enter(ticket, now_s=self._clock.now())
        finally:
            self._core.unpark(ticket)
            del self._put_turns[ticket]
            self._wake_next()

    def _may_go(self, ticket: Ticket) -> bool:
        self._check_open()
        if self._core.is_known(ticket):
            return True
        return self._core.can_enter(ticket, lease_waits=bool(self._lease_turns))

    async def set_demand(self, demand: Demand) -> None:
        """State what the next batch must hold; a waiting lease sees it at once."""
        self._core.demand = demand
        self._wake_next()

    async def lease(self) -> list[SampleMeta]:
        """Wait until the demand can be met, and lease that batch: the earliest due first.

        The demand stands until another is stated. One of 0 gives an empty batch, also to a lease
        that waits already.

        Raises:
            QueueClosed: the queue was closed first.
        """
        turn = asyncio.Event()
        self._lease_turns.append(turn)
        try:
            self._check_open()
            while not (self._lease_turns[0] is turn and self._core.can_lease()):
                self._wake_next()  # the put in front may be what this lease lacks
                turn.clear()
                await turn.wait()
                self._check_open()
            return self._core.lease()
        finally:
            self._lease_turns.remove(turn)
            self._wake_next()

    async def fetch(self, sample_ids: Sequence[str]) -> list[bytes]:
        """Return the payloads of leased samples, in the order asked.

        Raises:
            QueueClosed: the queue was closed.
            ValueError: one of them is not leased.
        """
        self._check_open()
        return self._core.payloads(sample_ids)

    async def acknowledge(self, sample_ids: Sequence[str]) -> None:
        """Forget leased samples: they are trained, and their ids are refused from now on.

        Raises:
            ValueError: one of them is inside, but not leased; none is forgotten.
        """
        self._core.acknowledge(sample_ids)
        self._wake_next()

    async def return_leases(self) -> None:
        """Put every leased sample back in its old place."""
        self._core.return_leases()
        self._wake_next()

    async def close(self) -> None:
        """Wake every waiter with QueueClosed. Idempotent."""
        self._closed = True
        for turn in (*self._put_turns.values(), *self._lease_turns):
            turn.set()

    def _check_open(self) -> None:
        if self._closed:
            raise QueueClosed("the sample queue is closed")

    def _wake_next(self) -> None:
        if self._lease_turns and self._core.can_lease():
            self._lease_turns[0].set()
        first = self._core.first_parked
        if first and not self._closed and self._may_go(first):
            self._put_turns[first].set()
