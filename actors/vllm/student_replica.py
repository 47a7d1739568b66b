# pyright: basic
"""The Serve deployment of the student: bytes in, bytes out, weights from the version board."""

import asyncio
import importlib
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING

import msgspec
from ray import serve

from opdkit.actors.board_access import BoardAddress, RemoteBoard
from opdkit.actors.vllm.weight_follower import WeightFollower
from opdkit.protocols.config import StudentSection
from opdkit.protocols.ids import ReplicaId
from opdkit.protocols.messages import GenerateRequest

if TYPE_CHECKING:
    from opdkit.actors.vllm.student_engine import StudentEngine

REQUEST_DECODER = msgspec.msgpack.Decoder(GenerateRequest)


class StudentReplica:
    """One replica; wrapped with ``serve.deployment`` in ``actors.serving``.

    It begins to serve when its engine runs and has the current weights of the board. Before the
    first publication it accepts requests, which wait for it.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, section: StudentSection, *, seed: int, board: BoardAddress
    ) -> None:
        replica_id = ReplicaId(serve.get_replica_context().replica_id.unique_id)
        engine_class = await asyncio.to_thread(_engine_class)
        self._engine = await engine_class.start(section, seed=seed)
        follower = WeightFollower(RemoteBoard(board), replica_id=replica_id, engine=self._engine)
        await follower.join()
        # Serve has no hook that runs for as long as the replica lives, so the group is entered
        # here; it ends with the process.
        background = await asyncio.TaskGroup().__aenter__()
        self._following = background.create_task(follower.run(), name="follow-weights")

    async def generate(self, request: bytes) -> AsyncGenerator[bytes, None]:
        """Stream a reply: ``GenerateRequest`` in, ``TokenChunk`` out, both as MessagePack.

        Raises:
            As ``StudentEngine.generate``.
        """
        async with aclosing(self._engine.generate(REQUEST_DECODER.decode(request))) as chunks:
            async for chunk in chunks:
                yield msgspec.msgpack.encode(chunk)

    async def probe(self, token_ids: bytes) -> bytes:
        """Return [T-1] float32 log-probabilities of [T] int32 ids: for self-tests."""
        logprobs = await self._engine.probe(token_ids)
        return logprobs.astype("<f4").tobytes()

    async def stats(self) -> bytes:
        """Return ``StudentStats`` as MessagePack."""
        return msgspec.msgpack.encode(self._engine.stats())

    async def check_health(self) -> None:
        """Have Serve replace this replica when it cannot do its work any more.

        Raises:
            ReplicaLost: the engine died.
        """
        await self._engine.check_health()
        if self._following.done():
            self._following.result()

    def __del__(self) -> None:
        """End with the replica; Serve calls this, and so does Python, also on half-made ones."""
        if (following := getattr(self, "_following", None)) is not None:
            following.cancel()
        if (engine := getattr(self, "_engine", None)) is not None:
            engine.stop()


def _engine_class() -> "type[StudentEngine]":
    # Importing vLLM takes seconds and half a gigabyte; whoever only deploys must not pay them.
    module = importlib.import_module("opdkit.actors.vllm.student_engine")
    engine_class: type[StudentEngine] = module.StudentEngine
    return engine_class
