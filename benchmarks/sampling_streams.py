"""Streams that sample from a student without a pause, and an account of their replies."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Protocol

import numpy as np

from opdkit.protocols.errors import OpdkitError
from opdkit.protocols.messages import GenerateRequest, TokenChunk

PROMPT_TOKENS = 32
SEED = 0
FINISHED = frozenset({"stop", "length"})


class Student(Protocol):
    """What the streams sample from: a ``StudentSampler`` whose replies can be closed."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Stream a reply."""
        ...


class SamplingStreams:
    """Asks for one reply after the other, on several streams at once, until told to stop."""

    def __init__(self, student: Student, *, num_vocab: int, max_tokens: int) -> None:
        """Sample from ids below ``num_vocab``, replies of at most ``max_tokens``."""
        self._student = student
        self._random = np.random.default_rng(SEED)
        self._num_vocab = num_vocab
        self._max_tokens = max_tokens
        self._is_stopped = False
        self._num_started = 0
        self._num_finished = 0
        self._num_across_versions = 0
        self._num_tokens = 0

    @asynccontextmanager
    async def run(self, num_streams: int) -> AsyncGenerator[None, None]:
        """Sample within the block, from when every stream has had a token to its reply's end."""
        flowing = [asyncio.Event() for _ in range(num_streams)]
        async with asyncio.TaskGroup() as streams:
            for number, event in enumerate(flowing):
                streams.create_task(self._stream(number, event), name=f"stream-{number}")
            for event in flowing:
                await event.wait()
            yield
            self._is_stopped = True

    def account(self) -> Mapping[str, float]:
        """Say what became of the replies; all have ended."""
        return {
            "replies": self._num_started,
            "replies_across_versions": self._num_across_versions,
            "dropped_replies": self._num_started - self._num_finished,
            "sampled_tokens": self._num_tokens,
        }

    async def _stream(self, number: int, flows: asyncio.Event) -> None:
        while not self._is_stopped:
            self._num_started += 1
            chunks: list[TokenChunk] = []
            try:
                async with aclosing(self._student.generate(self._request(number))) as reply:
                    async for chunk in reply:
                        chunks.append(chunk)
                        flows.set()
            except OpdkitError:
                continue  # started, not finished: the account shows it
            self._count(chunks)

    def _request(self, number: int) -> GenerateRequest:
        prompt = self._random.integers(self._num_vocab, size=PROMPT_TOKENS, dtype=np.int32)
        return GenerateRequest(
            request_id=f"stream-{number}-{self._num_started}",
            session_id=f"stream-{number}",
            token_ids=prompt.astype("<i4").tobytes(),
            max_tokens=self._max_tokens,
            temperature=1.0,
            top_p=1.0,
            top_k=-1,
            seed=self._num_started,
        )

    def _count(self, chunks: Sequence[TokenChunk]) -> None:
        versions = [span.policy_version for chunk in chunks for span in chunk.spans]
        self._num_tokens += sum(chunk.num_tokens for chunk in chunks)
        self._num_across_versions += len(set(versions)) > 1
        is_whole = bool(chunks) and chunks[-1].finish_reason in FINISHED
        # A version after a newer one: tokens of a reply were taken from weights long replaced.
        self._num_finished += is_whole and versions == sorted(versions)
