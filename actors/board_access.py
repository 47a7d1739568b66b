# pyright: basic
"""The version board across processes, and how it learns that a replica died.

Ray does not cancel the calls of a caller that died, so a board cannot see the death of a replica
that waits on it. But Ray does tell whoever holds a reference to an object that the object's owner
died. So each replica keeps one call open, ``until_deregistered``; its result is owned by the
replica and, as long as the replica lives, pending. The replica hands the reference of that result
to ``watch`` on the board's actor, which waits for it too, and deregisters the replica when it
hears that the owner is gone. That takes as long as a connection takes to break: milliseconds on
one machine. Where it is not seen (a network that swallows packets), the deadline of ``publish``
ends the waiting.

The actor that is the board has the methods of ``WatchedBoard``.
"""

from typing import Any

import ray
from ray.exceptions import RayError

from opdkit.actors.calls import call
from opdkit.engine.version_board import VersionBoard
from opdkit.protocols.ids import PolicyVersion, ReplicaId
from opdkit.protocols.messages import Message, WeightManifest

LONG_POLL_S = 600.0
"""After so long without news a replica asks again."""


class BoardAddress(Message, frozen=True, kw_only=True):
    """Where the actor that is the board is found."""

    actor_name: str
    namespace: str
    control_s: float
    """Longest time that a call other than waiting for news may take, in seconds."""


class WatchedBoard(VersionBoard):
    """The board as an actor: wrap it with ``ray.remote``, or inherit from it."""

    async def watch(self, replica_id: ReplicaId, lifeline: list[Any]) -> None:
        """Deregister a replica when it dies.

        Args:
            replica_id: the replica, registered.
            lifeline: one reference to an object that the replica owns, pending while it lives.
                In a list, because Ray would wait for a reference outside of one before calling.
        """
        [pending] = lifeline
        try:
            await pending
        except RayError:  # the owner died
            await self.deregister(replica_id)


class RemoteBoard:
    """A replica's access to the board, wherever that runs."""

    def __init__(self, address: BoardAddress) -> None:
        self._address = address
        self._actor = ray.get_actor(address.actor_name, namespace=address.namespace)
        self._lifeline: Any = None

    async def register(self, replica_id: ReplicaId) -> None:
        """Join, and have the board watch this process."""
        await self._call("register", replica_id)
        self._lifeline = self._actor.until_deregistered.remote(replica_id)
        self._actor.watch.remote(replica_id, [self._lifeline])

    async def current_manifest(self) -> WeightManifest | None:
        """Return what is posted."""
        return await self._call("current_manifest")

    async def next_manifest(self, replica_id: ReplicaId) -> WeightManifest | None:
        """Wait for news, or for ``LONG_POLL_S``."""
        return await self._call("next_manifest", replica_id, deadline_s=LONG_POLL_S)

    async def report_applied(
        self, replica_id: ReplicaId, version: PolicyVersion, checksum: str
    ) -> None:
        """Prove a version."""
        await self._call("report_applied", replica_id, version, checksum)

    async def report_refused(
        self, replica_id: ReplicaId, version: PolicyVersion, reason: str
    ) -> None:
        """Decline a version."""
        await self._call("report_refused", replica_id, version, reason)

    async def _call(self, method: str, *arguments: Any, deadline_s: float | None = None) -> Any:
        return await call(
            lambda: getattr(self._actor, method).remote(*arguments),
            name=f"board.{method}",
            deadline_s=deadline_s or self._address.control_s,
        )
