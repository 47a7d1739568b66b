"""Streams beside an update: every reply is accounted for."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

import pytest

from opdkit.benchmarks.sampling_streams import SamplingStreams
from opdkit.protocols.errors import ReplicaLost
from opdkit.protocols.ids import PolicyVersion
from opdkit.protocols.messages import GenerateRequest, TokenChunk, VersionSpan
from tests.conftest import Run


def chunk(version: int, *, finish_reason: str | None = None) -> TokenChunk:
    return TokenChunk(
        token_ids=bytes(4),
        logprobs=bytes(4),
        spans=(VersionSpan(policy_version=PolicyVersion(version), num_tokens=1),),
        finish_reason=finish_reason,
    )


class Scripted:
    """A student whose replies follow a script; the last one is given again and again."""

    def __init__(self, *replies: Sequence[TokenChunk | Exception]) -> None:
        self._replies = list(replies)
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Give the next reply of the script."""
        self.requests.append(request)
        reply = self._replies.pop(0) if len(self._replies) > 1 else self._replies[0]
        for item in reply:
            await asyncio.sleep(0)
            if isinstance(item, Exception):
                raise item
            yield item


async def account_of(student: Scripted, *, num_streams: int = 1, turns: int = 20) -> object:
    streams = SamplingStreams(student, num_vocab=50, max_tokens=9)
    async with streams.run(num_streams):
        for _ in range(turns):
            await asyncio.sleep(0)
    return streams.account()


WHOLE = [chunk(1), chunk(1, finish_reason="length")]


def test_whole_replies_are_not_dropped(run: Run) -> None:
    student = Scripted(WHOLE)
    account = run(account_of(student, num_streams=3))
    assert account["replies"] == len(student.requests) >= 3
    assert account["dropped_replies"] == account["replies_across_versions"] == 0
    assert account["sampled_tokens"] == 2 * account["replies"]


def test_a_reply_across_an_update_is_whole(run: Run) -> None:
    account = run(account_of(Scripted([chunk(1), chunk(2, finish_reason="stop")], WHOLE)))
    assert account["replies_across_versions"] == 1
    assert account["dropped_replies"] == 0


@pytest.mark.parametrize(
    "reply",
    [
        [chunk(1), ReplicaLost("gone")],
        [chunk(1, finish_reason="abort")],
        [chunk(1)],
        [chunk(2), chunk(1, finish_reason="length")],
    ],
    ids=["failed", "aborted", "cut off", "with weights replaced before"],
)
def test_a_broken_reply_counts_as_dropped(run: Run, reply: list[TokenChunk | Exception]) -> None:
    account = run(account_of(Scripted(reply, WHOLE)))
    assert account["dropped_replies"] == 1


def test_prompts_are_ids_of_the_vocabulary_and_requests_are_told_apart(run: Run) -> None:
    student = Scripted(WHOLE)
    run(account_of(student, num_streams=2))
    assert len({request.request_id for request in student.requests}) == len(student.requests)
    for request in student.requests:
        assert max(memoryview(request.token_ids).cast("i")) < 50
        assert request.max_tokens == 9
