# pyright: basic
"""The student's and the teacher's engines as the engine's roles, over Ray Serve handles."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import msgspec

from opdkit.actors.calls import call, stream
from opdkit.actors.vllm.student_stats import StudentStats
from opdkit.protocols.messages import (
    GenerateRequest,
    ScoreRequest,
    StageMeter,
    TeacherScores,
    TokenChunk,
)

CHUNK_DECODER = msgspec.msgpack.Decoder(TokenChunk)
SCORES_DECODER = msgspec.msgpack.Decoder(TeacherScores)
STUDENT_STATS_DECODER = msgspec.msgpack.Decoder(StudentStats)
METER_DECODER = msgspec.msgpack.Decoder(StageMeter)


class ServeStudent:
    """All replicas of the student (``StudentSampler``)."""

    def __init__(self, handle: Any, *, generate_s: float, control_s: float) -> None:
        self._unary = handle
        self._streaming = handle.options(method_name="generate", stream=True)
        self._generate_s = generate_s
        self._control_s = control_s

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Stream the reply from the replica that served this session before, if it can.

        Raises:
            PromptError: the history leaves no room for a token.
            ReplicaLost: the replica died; the chunks already given stay valid.
            DeadlineExceeded: the reply took longer than ``generate_s``.
        """
        data = msgspec.msgpack.encode(request)
        handle = self._streaming.options(session_id=request.session_id)
        name = f"student.generate({request.request_id})"
        chunks = stream(lambda: handle.remote(data), name=name, deadline_s=self._generate_s)
        async with aclosing(chunks):
            async for chunk in chunks:
                yield CHUNK_DECODER.decode(chunk)

    async def stats(self) -> list[StudentStats]:
        """Return the counters of every replica."""
        results = await _every_replica(self._unary, "stats", self._control_s)
        return [STUDENT_STATS_DECODER.decode(data) for data in results]

    async def probe(self, token_ids: bytes) -> list[bytes]:
        """Return every replica's [T-1] float32 log-probabilities of [T] int32 ids."""
        return await _every_replica(self._unary, "probe", self._control_s, token_ids)


class ServeTeacher:
    """All replicas of one teacher (``TeacherScorer``)."""

    def __init__(self, handle: Any, *, score_s: float, control_s: float) -> None:
        self._handle = handle
        self._score_s = score_s
        self._control_s = control_s

    async def score(self, request: ScoreRequest) -> TeacherScores:
        """Score one sequence.

        Raises:
            TeacherAlignmentError: the ids that came back are not those sent.
            NonFiniteScoresError: the teacher gave NaN or +inf.
            ReplicaLost: the replica died.
            DeadlineExceeded: it took longer than ``score_s``.
        """
        data = msgspec.msgpack.encode(request)
        scores = await call(
            lambda: self._handle.score.remote(data),
            name=f"teacher.score({request.sample_id})",
            deadline_s=self._score_s,
        )
        return SCORES_DECODER.decode(scores)

    async def stats(self) -> list[StageMeter]:
        """Return the counters of every replica."""
        results = await _every_replica(self._handle, "stats", self._control_s)
        return [METER_DECODER.decode(data) for data in results]


async def _every_replica(
    handle: Any, method: str, deadline_s: float, *arguments: Any
) -> list[bytes]:
    """Call a method on every live replica; replicas that die meanwhile are left out."""
    results = await call(
        lambda: handle.broadcast(method, *arguments).results_async(return_exceptions=True),
        name=f"broadcast {method}",
        deadline_s=deadline_s,
    )
    return [result for result in results if isinstance(result, bytes)]
