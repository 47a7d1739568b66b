"""The version board, as a trainer that publishes and replicas that answer use it."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from opdkit.engine.version_board import VersionBoard
from opdkit.protocols.errors import ReplicaLost, WeightUpdateError
from opdkit.protocols.ids import PolicyVersion, ReplicaId
from opdkit.protocols.messages import WeightManifest

Run = Callable[[Coroutine[Any, Any, Any]], Any]

A, B = ReplicaId("a"), ReplicaId("b")


def weights(version: int, checksum: str = "") -> WeightManifest:
    return WeightManifest(
        policy_version=PolicyVersion(version),
        location=f"/shm/{version}",
        num_bytes=8,
        checksum=checksum or f"sum-{version}",
    )


async def settle() -> None:
    """Let every task run until it waits for another."""
    for _ in range(20):
        await asyncio.sleep(0)


async def serve_next(board: VersionBoard, replica_id: ReplicaId) -> WeightManifest | None:
    manifest = await board.next_manifest(replica_id)
    if manifest is not None:
        await board.report_applied(replica_id, manifest.policy_version, manifest.checksum)
    return manifest


def test_a_publication_ends_when_every_replica_has_proved_it(run: Run) -> None:
    async def scenario() -> None:
        board = VersionBoard()
        await board.register(A)
        await board.register(B)
        async with asyncio.TaskGroup() as group:
            publication = group.create_task(board.publish(weights(0)))
            assert await serve_next(board, A) == weights(0)
            await settle()
            assert not publication.done()
            await serve_next(board, B)
        assert await board.served_versions() == {A: 0, B: 0}

    run(scenario())


def test_without_replicas_a_publication_only_posts(run: Run) -> None:
    async def scenario() -> None:
        board = VersionBoard()
        await board.publish(weights(3))
        await board.register(A)
        assert await board.current_manifest() == weights(3)
        assert await serve_next(board, A) == weights(3)

    run(scenario())


def test_a_replica_waits_for_what_it_has_not_answered(run: Run) -> None:
    async def scenario() -> None:
        board = VersionBoard()
        await board.register(A)
        async with asyncio.TaskGroup() as group:
            group.create_task(board.publish(weights(0)))
            await serve_next(board, A)
            waiting = group.create_task(board.next_manifest(A))
            await settle()
            assert not waiting.done()
            publication = group.create_task(board.publish(weights(1)))
            assert await waiting == weights(1)
            await board.report_applied(A, PolicyVersion(1), "sum-1")
            await publication

    run(scenario())


def test_a_late_replica_is_waited_for(run: Run) -> None:
    async def scenario() -> None:
        board = VersionBoard()
        await board.register(A)
        async with asyncio.TaskGroup() as group:
            publication = group.create_task(board.publish(weights(0)))
            await settle()
            await board.register(B)
            await serve_next(board, A)
            await settle()
            assert not publication.done()
            await serve_next(board, B)

    run(scenario())


def test_a_death_in_mid_publication_releases_the_publisher(run: Run) -> None:
    async def scenario() -> None:
        board = VersionBoard()
        await board.register(A)
        await board.register(B)
        async with asyncio.TaskGroup() as group:
            group.create_task(board.publish(weights(0)))
            await serve_next(board, A)
            await board.deregister(B)
        assert await board.served_versions() == {A: 0}

    run(scenario())


def test_a_refusal_reaches_the_publisher_with_its_reason(run: Run) -> None:
    async def scenario() -> None:
        board = VersionBoard()
        await board.register(A)
        async with asyncio.TaskGroup() as group:
            publication = group.create_task(refused(board, weights(4)))
            assert await board.next_manifest(A) == weights(4)
            await board.report_refused(A, PolicyVersion(4), "no such file")
            message = await publication
        assert "version 4" in message
        assert "replica a: no such file" in message
        assert await board.served_versions() == {A: None}

    run(scenario())


async def refused(board: VersionBoard, manifest: WeightManifest) -> str:
    with pytest.raises(WeightUpdateError) as caught:
        await board.publish(manifest)
    return str(caught.value)


def test_another_checksum_is_no_proof(run: Run) -> None:
    async def scenario() -> None:
        board = VersionBoard()
        await board.register(A)
        async with asyncio.TaskGroup() as group:
            publication = group.create_task(refused(board, weights(4)))
            await board.next_manifest(A)
            await board.report_applied(A, PolicyVersion(4), "other")
            message = await publication
        assert "checksum other, published sum-4" in message

    run(scenario())


def test_publishing_again_asks_those_that_refused(run: Run) -> None:
    async def scenario() -> None:
        board = VersionBoard()
        await board.register(A)
        async with asyncio.TaskGroup() as group:
            group.create_task(refused(board, weights(4)))
            await board.next_manifest(A)
            await board.report_refused(A, PolicyVersion(4), "once")
        async with asyncio.TaskGroup() as group:
            group.create_task(board.publish(weights(4)))
            assert await serve_next(board, A) == weights(4)

    run(scenario())


def test_an_older_version_can_follow_a_newer_one(run: Run) -> None:
    """A trainer that lost a rank goes back to its checkpoint."""

    async def scenario() -> None:
        board = VersionBoard()
        await board.register(A)
        for manifest in (weights(12), weights(10), weights(10, "made again")):
            async with asyncio.TaskGroup() as group:
                group.create_task(board.publish(manifest))
                assert await serve_next(board, A) == manifest

    run(scenario())


def test_a_late_answer_to_an_older_version_proves_nothing(run: Run) -> None:
    async def scenario() -> None:
        board = VersionBoard()
        await board.register(A)
        async with asyncio.TaskGroup() as group:
            first = group.create_task(refused(board, weights(0)))
            await settle()
            second = group.create_task(board.publish(weights(1)))
            assert "gave way" in await first
            await board.report_applied(A, PolicyVersion(0), "sum-0")
            await settle()
            assert not second.done()
            await serve_next(board, A)

    run(scenario())


def test_a_cancelled_publication_can_be_taken_up_again(run: Run) -> None:
    async def scenario() -> None:
        board = VersionBoard()
        await board.register(A)
        async with asyncio.TaskGroup() as group:
            publication = group.create_task(board.publish(weights(0)))
            await settle()
            publication.cancel()
        await serve_next(board, A)
        await board.publish(weights(0))

    run(scenario())


def test_a_cancelled_wait_for_news_loses_none(run: Run) -> None:
    async def scenario() -> None:
        board = VersionBoard()
        await board.register(A)
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(board.next_manifest(A))
            await settle()
            publication = group.create_task(board.publish(weights(0)))
            waiting.cancel()
            await settle()
            assert not publication.done()
            await serve_next(board, A)

    run(scenario())


def test_closing_wakes_every_waiter(run: Run) -> None:
    async def scenario() -> None:
        board = VersionBoard()
        await board.register(A)
        await board.register(B)
        async with asyncio.TaskGroup() as group:
            publication = group.create_task(refused(board, weights(0)))
            await serve_next(board, A)
            waiting = group.create_task(board.next_manifest(A))
            presence = group.create_task(board.until_deregistered(B))
            await settle()
            await board.close()
            await board.close()
            assert await waiting is None
            assert "closed" in await publication
            await presence

    run(scenario())


def test_who_is_not_registered_is_told_so(run: Run) -> None:
    async def scenario() -> None:
        board = VersionBoard()
        for attempt in (
            board.next_manifest(A),
            board.report_applied(A, PolicyVersion(0), ""),
            board.report_refused(A, PolicyVersion(0), ""),
        ):
            with pytest.raises(ReplicaLost, match="a is not registered"):
                await attempt
        await board.deregister(A)
        await board.until_deregistered(A)

    run(scenario())


def test_deregistering_wakes_a_waiting_replica(run: Run) -> None:
    async def scenario() -> None:
        board = VersionBoard()
        await board.register(A)

        async def wait() -> None:
            with pytest.raises(ReplicaLost):
                await board.next_manifest(A)

        async with asyncio.TaskGroup() as group:
            group.create_task(wait())
            group.create_task(board.until_deregistered(A))
            await settle()
            await board.deregister(A)

    run(scenario())
