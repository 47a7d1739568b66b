"""A replica that follows the board, in all the ways in which that goes wrong."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from opdkit.actors.vllm.weight_follower import WeightFollower
from opdkit.engine.version_board import VersionBoard
from opdkit.protocols.errors import ReplicaLost, WeightUpdateError
from opdkit.protocols.ids import PolicyVersion, ReplicaId
from opdkit.protocols.messages import WeightManifest

Run = Callable[[Coroutine[Any, Any, Any]], Any]

REPLICA = ReplicaId("r")


def weights(version: int) -> WeightManifest:
    return WeightManifest(
        policy_version=PolicyVersion(version), location="", num_bytes=0, checksum=f"sum-{version}"
    )


class ScriptedEngine:
    """Takes every version but those that it is told to refuse or to die of."""

    def __init__(self, *, refused: set[int] | None = None, deadly: set[int] | None = None) -> None:
        self.served: WeightManifest | None = None
        self.num_applied = 0
        self._refused = refused or set()
        self._deadly = deadly or set()

    async def apply(self, manifest: WeightManifest) -> str:
        """Do as the script says."""
        await asyncio.sleep(0)
        if manifest.policy_version in self._refused:
            raise WeightUpdateError("no such file")
        if manifest.policy_version in self._deadly:
            raise ReplicaLost("the engine died")
        self.served = manifest
        self.num_applied += 1
        return manifest.checksum


def test_a_replica_joins_with_the_current_weights(run: Run) -> None:
    async def scenario() -> None:
        board, engine = VersionBoard(), ScriptedEngine()
        await board.publish(weights(5))
        await WeightFollower(board, replica_id=REPLICA, engine=engine).join()
        assert engine.served == weights(5)
        await board.publish(weights(5))  # returns: it is proved

    run(scenario())


def test_a_replica_that_cannot_take_the_current_weights_does_not_join(run: Run) -> None:
    async def scenario() -> None:
        board = VersionBoard()
        await board.publish(weights(5))
        follower = WeightFollower(board, replica_id=REPLICA, engine=ScriptedEngine(refused={5}))
        with pytest.raises(WeightUpdateError, match="no such file"):
            await follower.join()

    run(scenario())


def test_every_version_is_followed_until_the_board_closes(run: Run) -> None:
    async def scenario() -> None:
        board, engine = VersionBoard(), ScriptedEngine()
        follower = WeightFollower(board, replica_id=REPLICA, engine=engine)
        await follower.join()
        async with asyncio.TaskGroup() as group:
            group.create_task(follower.run())
            for version in range(3):
                await board.publish(weights(version))
                assert engine.served == weights(version)
            await board.close()
        assert engine.num_applied == 3

    run(scenario())


def test_after_a_refusal_the_next_version_is_taken(run: Run) -> None:
    async def scenario() -> None:
        board, engine = VersionBoard(), ScriptedEngine(refused={1})
        follower = WeightFollower(board, replica_id=REPLICA, engine=engine)
        await follower.join()
        async with asyncio.TaskGroup() as group:
            group.create_task(follower.run())
            await board.publish(weights(0))
            with pytest.raises(WeightUpdateError, match="no such file"):
                await board.publish(weights(1))
            assert engine.served == weights(0)
            await board.publish(weights(2))
            await board.close()

    run(scenario())


def test_a_replica_that_the_board_forgot_registers_again(run: Run) -> None:
    async def scenario() -> None:
        board, engine = VersionBoard(), ScriptedEngine()
        follower = WeightFollower(board, replica_id=REPLICA, engine=engine)
        await follower.join()
        async with asyncio.TaskGroup() as group:
            group.create_task(follower.run())
            await board.publish(weights(0))
            await board.deregister(REPLICA)
            for _ in range(20):  # let it find out
                await asyncio.sleep(0)
            assert REPLICA in await board.served_versions()
            await board.publish(weights(0))
            await board.close()
        assert engine.num_applied == 1  # it had them, and only proved it again

    run(scenario())


def test_the_death_of_the_engine_ends_the_following(run: Run) -> None:
    async def scenario() -> None:
        board = VersionBoard()
        follower = WeightFollower(board, replica_id=REPLICA, engine=ScriptedEngine(deadly={1}))
        await follower.join()

        async def follow() -> None:
            with pytest.raises(ReplicaLost, match="the engine died"):
                await follower.run()
            await board.deregister(REPLICA)

        async with asyncio.TaskGroup() as group:
            group.create_task(follow())
            await board.publish(weights(1))

    run(scenario())
