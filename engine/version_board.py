"""The board that shows the newest weights, and on which replicas prove that they serve them.

One board a job. ``publish`` posts a manifest and waits; each replica waits in ``next_manifest``,
applies what it is given and answers with ``report_applied`` or ``report_refused``; every answer,
arrival and departure wakes everybody to look again. The states of a replica are

    register ──▶ behind ──next_manifest──▶ behind ──report_applied──▶ serving
                   ▲                          └─────report_refused──▶ refused
                   └───────────── publish of another manifest ────────────┘

A publication is over when no registered replica is behind it. A replica that dies must therefore
be deregistered, by whoever sees it die (``actors.board``); the deadline of the caller of
``publish`` covers the deaths that nobody sees. A replica that registers late is given the current
manifest, and is waited for like the others.
"""

import asyncio
from dataclasses import dataclass

from opdkit.protocols.errors import ReplicaLost, WeightUpdateError
from opdkit.protocols.ids import PolicyVersion, ReplicaId
from opdkit.protocols.messages import WeightManifest


@dataclass
class _Standing:
    """What the board knows of one replica."""

    answered: WeightManifest | None = None
    """The last manifest it has answered; another than the current one: it is behind."""
    served: PolicyVersion | None = None
    refusal: str | None = None
    """Why ``answered`` is not served; None: it is."""


class VersionBoard:
    """Shows every replica the current weights and counts who serves them."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._current: WeightManifest | None = None
        self._standings: dict[ReplicaId, _Standing] = {}
        self._is_closed = False

    async def register(self, replica_id: ReplicaId) -> None:
        """Add a replica, which is behind until it answers. A second time: it starts anew."""
        async with self._changed:
            self._standings[replica_id] = _Standing()
            self._changed.notify_all()

    async def deregister(self, replica_id: ReplicaId) -> None:
        """Forget a replica; nobody waits for it any more. Unknown ids are ignored."""
        async with self._changed:
            self._standings.pop(replica_id, None)
            self._changed.notify_all()

    async def until_deregistered(self, replica_id: ReplicaId) -> None:
        """Wait until this replica is gone from the board, or the board is closed."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._is_closed or replica_id not in self._standings
            )

    async def current_manifest(self) -> WeightManifest | None:
        """Return what is posted; None before the first publication."""
        return self._current

    async def next_manifest(self, replica_id: ReplicaId) -> WeightManifest | None:
        """Wait for a manifest that this replica has not answered. None: the board was closed.

        Raises:
            ReplicaLost: the replica is not registered, or was deregistered while it waited.
        """

        def is_due() -> bool:
            standing = self._standings.get(replica_id)
            return self._is_closed or standing is None or self._is_behind(standing)

        async with self._changed:
            await self._changed.wait_for(is_due)
            if self._is_closed:
                return None
            self._standing(replica_id)
            return self._current

    async def report_applied(
        self, replica_id: ReplicaId, version: PolicyVersion, checksum: str
    ) -> None:
        """Record that a replica serves a version, and what the weights it read added up to.

        Raises:
            ReplicaLost: the replica is not registered.
        """
        async with self._changed:
            standing = self._standing(replica_id)
            standing.served = version
            self._answer(standing, version, self._wrong_checksum(version, checksum))

    async def report_refused(
        self, replica_id: ReplicaId, version: PolicyVersion, reason: str
    ) -> None:
        """Record that a replica did not take a version and serves what it served before.

        Raises:
            ReplicaLost: the replica is not registered.
        """
        async with self._changed:
            self._answer(self._standing(replica_id), version, reason)

    async def publish(self, manifest: WeightManifest) -> None:
        """Post a manifest and wait until every registered replica serves it.

        With no replica registered this returns at once: those to come begin with it. Posting is
        not undone by cancellation, since replicas may have applied it; publishing the same
        manifest again goes on waiting, and asks those that refused once more.

        Raises:
            WeightUpdateError: a replica refused it or proved other weights (the message names
                them all), another manifest took its place, or the board is closed.
        """
        async with self._changed:
            self._post(manifest)
            await self._changed.wait_for(lambda: self._is_over(manifest))
            if self._is_closed:
                raise WeightUpdateError(
                    f"version {manifest.policy_version} is not published: the board is closed"
                )
            if self._current != manifest:
                raise WeightUpdateError(
                    f"version {manifest.policy_version} gave way to another while it was published"
                )
            refusals = self._refusals()
        if refusals:
            raise WeightUpdateError(
                f"version {manifest.policy_version} is not served everywhere: {refusals}"
            )

    async def served_versions(self) -> dict[ReplicaId, PolicyVersion | None]:
        """Return what each registered replica serves; None: nothing yet."""
        return {replica_id: standing.served for replica_id, standing in self._standings.items()}

    async def close(self) -> None:
        """Wake every waiter for good. Idempotent."""
        async with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _post(self, manifest: WeightManifest) -> None:
        if manifest != self._current:
            self._current = manifest
        for standing in self._standings.values():
            if standing.refusal is not None:
                standing.answered = standing.refusal = None
        self._changed.notify_all()

    def _is_over(self, manifest: WeightManifest) -> bool:
        return (
            self._is_closed
            or self._current != manifest
            or not any(self._is_behind(standing) for standing in self._standings.values())
        )

    def _is_behind(self, standing: _Standing) -> bool:
        return self._current is not None and standing.answered != self._current

    def _standing(self, replica_id: ReplicaId) -> _Standing:
        standing = self._standings.get(replica_id)
        if standing is None:
            raise ReplicaLost(f"replica {replica_id} is not registered")
        return standing

    def _answer(self, standing: _Standing, version: PolicyVersion, refusal: str | None) -> None:
        # An answer to a manifest that gave way meanwhile changes nothing for the current one.
        if self._current is not None and self._current.policy_version == version:
            standing.answered = self._current
            standing.refusal = refusal
            self._changed.notify_all()

    def _wrong_checksum(self, version: PolicyVersion, checksum: str) -> str | None:
        current = self._current
        if current is None or current.policy_version != version or current.checksum == checksum:
            return None
        return f"checksum {checksum}, published {current.checksum}"

    def _refusals(self) -> str:
        return "; ".join(
            f"replica {replica_id}: {standing.refusal}"
            for replica_id, standing in self._standings.items()
            if standing.refusal is not None
        )
