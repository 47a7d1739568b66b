# pyright: basic
"""The Serve deployment of a teacher: bytes in, bytes out."""

import asyncio
import importlib
from typing import TYPE_CHECKING

import msgspec

from opdkit.protocols.config import LossSection, TeacherSection
from opdkit.protocols.messages import ScoreRequest

if TYPE_CHECKING:
    from opdkit.actors.vllm.teacher_engine import TeacherEngine

REQUEST_DECODER = msgspec.msgpack.Decoder(ScoreRequest)


class TeacherReplica:
    """One replica; wrapped with ``serve.deployment`` in ``actors.serving``."""

    async def __init__(
        self, section: TeacherSection, *, loss: LossSection, vocab_size: int
    ) -> None:
        engine_class = await asyncio.to_thread(_engine_class)
        self._engine = await engine_class.start(section, loss=loss, vocab_size=vocab_size)

    async def score(self, request: bytes) -> bytes:
        """Score a sequence: ``ScoreRequest`` in, ``TeacherScores`` out, both as MessagePack.

        Raises:
            As ``TeacherEngine.score``.
        """
        scores = await self._engine.score(REQUEST_DECODER.decode(request))
        return msgspec.msgpack.encode(scores)

    async def stats(self) -> bytes:
        """Return a ``StageMeter`` as MessagePack."""
        return msgspec.msgpack.encode(self._engine.meter())

    async def check_health(self) -> None:
        """Have Serve replace this replica when its engine died.

        Raises:
            ReplicaLost: the engine died.
        """
        await self._engine.check_health()

    def __del__(self) -> None:
        """End with the replica; Serve calls this, and so does Python, also on half-made ones."""
        if (engine := getattr(self, "_engine", None)) is not None:
            engine.stop()


def _engine_class() -> "type[TeacherEngine]":
    # Importing vLLM takes seconds and half a gigabyte; whoever only deploys must not pay them.
    return importlib.import_module("opdkit.actors.vllm.teacher_engine").TeacherEngine
