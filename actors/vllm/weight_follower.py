"""Keeps one student replica on the weights that the version board shows.

A replica waits at the board of its own accord, because one that starts later than a publication
must learn of it too. If the board restarts, it has forgotten its replicas: they register again.
"""

import asyncio
import logging
from typing import Protocol

from opdkit.protocols.errors import (
    DeadlineExceeded,
    InfrastructureError,
    ReplicaLost,
    WeightUpdateError,
)
from opdkit.protocols.ids import PolicyVersion, ReplicaId
from opdkit.protocols.messages import WeightManifest

FIRST_RETRY_S = 0.5
LONGEST_RETRY_S = 10.0

logger = logging.getLogger(__name__)


class Board(Protocol):
    """The version board, as a replica sees it. Semantics: ``engine.version_board``."""

    async def register(self, replica_id: ReplicaId) -> None:
        """Join."""
        ...

    async def current_manifest(self) -> WeightManifest | None:
        """Return what is posted."""
        ...

    async def next_manifest(self, replica_id: ReplicaId) -> WeightManifest | None:
        """Wait for news."""
        ...

    async def report_applied(
        self, replica_id: ReplicaId, version: PolicyVersion, checksum: str
    ) -> None:
        """Prove a version."""
        ...

    async def report_refused(
        self, replica_id: ReplicaId, version: PolicyVersion, reason: str
    ) -> None:
        """Decline a version."""
        ...


class WeightTaker(Protocol):
    """An engine that can change its weights in place."""

    @property
    def served(self) -> WeightManifest | None:
        """The weights last applied."""
        ...

    async def apply(self, manifest: WeightManifest) -> str:
        """Serve other weights; return their checksum as read."""
        ...


class WeightFollower:
    """Takes one version after the other from a board into an engine."""

    def __init__(self, board: Board, *, replica_id: ReplicaId, engine: WeightTaker) -> None:
        self._board = board
        self._replica_id = replica_id
        self._engine = engine

    async def join(self) -> None:
        """Register, and take what the board shows now: before this, the replica may not serve.

        Raises:
            WeightUpdateError: the engine cannot take the current weights.
        """
        await self._board.register(self._replica_id)
        manifest = await self._board.current_manifest()
        if manifest is not None and (refusal := await self._take(manifest)) is not None:
            raise WeightUpdateError(refusal)

    async def run(self) -> None:
        """Follow until the board is closed. The replica has joined.

        Raises:
            ReplicaLost: the engine died.
        """
        while (manifest := await self._next_manifest()) is not None:
            refusal = await self._take(manifest)
            if refusal is not None:
                # The publisher has the answer and decides. The old weights are served on.
                logger.warning("replica %s refused weights: %s", self._replica_id, refusal)

    async def _next_manifest(self) -> WeightManifest | None:
        retry_s = FIRST_RETRY_S
        while True:
            try:
                return await self._board.next_manifest(self._replica_id)
            except DeadlineExceeded:
                continue  # no news for long is no fault
            except ReplicaLost:
                pass
            try:
                await self._board.register(self._replica_id)
            except InfrastructureError:
                # Ray tells nobody when an actor is back.
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, LONGEST_RETRY_S)

    async def _take(self, manifest: WeightManifest) -> str | None:
        """Apply one version and answer the board; return why not, or None."""
        version = manifest.policy_version
        checksum, refusal = manifest.checksum, None
        if self._engine.served != manifest:  # else the board forgot
            try:
                checksum = await self._engine.apply(manifest)
            except WeightUpdateError as error:
                refusal = str(error)
        try:
            if refusal is None:
                await self._board.report_applied(self._replica_id, version, checksum)
            else:
                await self._board.report_refused(self._replica_id, version, refusal)
        except InfrastructureError as error:
            # The board still counts this replica as behind, and shows the manifest again.
            logger.warning("replica %s could not answer: %s", self._replica_id, error)
        return refusal
