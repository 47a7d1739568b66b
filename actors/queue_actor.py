"""The sample queue across processes: two channels, reached by actor calls.

``QueueActor`` runs in a process of its own; ``RemoteQueue`` is the ``SampleQueue`` that everybody
else holds. Payloads cross as bytes and are never turned into objects on the way.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from opdkit.actors.call_deadlines import lease_deadline_s, put_deadline_s
from opdkit.actors.calls import call
from opdkit.engine.clocks import MonotonicClock
from opdkit.engine.sample_queue import LeaseQueue
from opdkit.protocols.config import JobSpec
from opdkit.protocols.messages import Demand, SampleMeta

TRAINING, EVALUATION = "training", "evaluation"

_encode = msgspec.msgpack.encode


class QueueActor:
    """Hosts the queue of training samples and that of evaluation samples."""

    def __init__(self, *, max_samples: int, max_bytes: int) -> None:
        self._channels = {
            name: LeaseQueue(max_samples=max_samples, max_bytes=max_bytes, clock=MonotonicClock())
            for name in (TRAINING, EVALUATION)
        }
        self._channel_of: dict[str, str] = {}

    async def put(self, channel: str, meta: bytes, payload: bytes) -> None:
        """See ``SampleQueue.put``; ``meta`` is a msgpack ``SampleMeta``."""
        decoded = msgspec.msgpack.decode(meta, type=SampleMeta)
        await self._channels[channel].put(decoded, payload)
        self._channel_of[decoded.sample_id] = channel

    async def set_demand(self, channel: str, demand: bytes) -> None:
        """See ``SampleQueue.set_demand``; ``demand`` is a msgpack ``Demand``."""
        await self._channels[channel].set_demand(msgspec.msgpack.decode(demand, type=Demand))

    async def lease(self, channel: str) -> bytes:
        """See ``SampleQueue.lease``; a msgpack list of ``SampleMeta``."""
        return _encode(await self._channels[channel].lease())

    async def fetch(self, sample_ids: Sequence[str]) -> list[bytes]:
        """See ``SampleQueue.fetch``; the samples may be of either channel."""
        return [
            payload
            for sample_id in sample_ids
            for payload in await self._channels[self._channel_of[sample_id]].fetch([sample_id])
        ]

    async def acknowledge(self, channel: str, sample_ids: Sequence[str]) -> None:
        """See ``SampleQueue.acknowledge``."""
        await self._channels[channel].acknowledge(sample_ids)
        for sample_id in sample_ids:
            self._channel_of.pop(sample_id, None)

    async def return_leases(self, channel: str) -> None:
        """See ``SampleQueue.return_leases``."""
        await self._channels[channel].return_leases()

    async def close(self, channel: str) -> None:
        """See ``SampleQueue.close``."""
        await self._channels[channel].close()


async def fetch_payloads(
    actor: Any, sample_ids: Sequence[str], *, deadline_s: float
) -> list[bytes]:
    """Return the payloads of leased samples, of whatever channel: what a trainer rank needs."""
    wanted = list(sample_ids)
    payloads: list[bytes] = await call(
        lambda: actor.fetch.remote(wanted), name="queue fetch", deadline_s=deadline_s
    )
    return payloads


class RemoteQueue:
    """One channel of a ``QueueActor``, as a ``SampleQueue``."""

    def __init__(self, actor: Any, channel: str, *, spec: JobSpec) -> None:
        self._actor = actor  # a Ray actor handle: its methods are made at run time
        self._channel = channel
        self._control_s = spec.deadlines.control_s
        self._put_s = put_deadline_s(spec)
        self._lease_s = lease_deadline_s(spec)

    async def put(self, meta: SampleMeta, payload: bytes) -> None:
        """See ``SampleQueue.put``. A queue full until the sample is overdue is broken."""
        await self._call("put", self._put_s, _encode(meta), payload)

    async def set_demand(self, demand: Demand) -> None:
        """See ``SampleQueue.set_demand``."""
        await self._call("set_demand", self._control_s, _encode(demand))

    async def lease(self) -> list[SampleMeta]:
        """See ``SampleQueue.lease``. Waits for rollouts, at most a trajectory's deadline."""
        reply = await self._call("lease", self._lease_s)
        return msgspec.msgpack.decode(reply, type=list[SampleMeta])

    async def fetch(self, sample_ids: Sequence[str]) -> list[bytes]:
        """See ``SampleQueue.fetch``."""
        return await fetch_payloads(self._actor, sample_ids, deadline_s=self._control_s)

    async def acknowledge(self, sample_ids: Sequence[str]) -> None:
        """See ``SampleQueue.acknowledge``."""
        await self._call("acknowledge", self._control_s, list(sample_ids))

    async def return_leases(self) -> None:
        """See ``SampleQueue.return_leases``."""
        await self._call("return_leases", self._control_s)

    async def close(self) -> None:
        """See ``SampleQueue.close``."""
        await self._call("close", self._control_s)

    async def _call(self, method: str, deadline_s: float, *arguments: object) -> Any:
        send = getattr(self._actor, method).remote
        return await call(
            lambda: send(self._channel, *arguments),
            name=f"queue {self._channel} {method}",
            deadline_s=deadline_s,
        )
