# pyright: basic
"""Deploying parts of a job that hold no engine: readiness, resizing, removal."""

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import pytest
from ray import serve

from opdkit.actors.calls import call
from opdkit.actors.serving import Part, application_name, deploy, handle_of, remove, set_replicas
from opdkit.protocols.config import PlacementSection
from opdkit.protocols.errors import ConfigError, InfrastructureError, StartupTimeout
from tests.actors.conftest import RunReal

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]

JOB = "parts"


class Plain:
    """Starts at once."""

    async def pid(self) -> int:
        """Return the process's id."""
        return os.getpid()


class Slow(Plain):
    """Never starts."""

    async def __init__(self) -> None:  # type: ignore[misc]  # Serve awaits it
        await asyncio.Event().wait()


class Broken(Plain):
    """Cannot start."""

    def __init__(self) -> None:
        raise ConfigError("loss.top_k is 99")


def part(role: str, replica_class: type) -> Part:
    return Part(
        role=role,
        replica_class=replica_class,
        arguments={},
        num_replicas=1,
        placement=PlacementSection(num_cpus=0.1),
        max_ongoing_requests=4,
    )


@pytest.fixture(autouse=True)
def removed(cluster: None, run_real: RunReal) -> Iterator[None]:
    yield
    run_real(remove(JOB, ["plain", "other", "slow", "broken", "never deployed"]))
    assert not serve.status().applications


async def pids(role: str) -> set[int]:
    handle = await handle_of(JOB, role)
    found: Any = await call(
        lambda: handle.broadcast("pid").results_async(), name="pids", deadline_s=30
    )
    return set(found)


def test_another_number_of_replicas_disturbs_nobody(run_real: RunReal) -> None:
    async def resize() -> None:
        await deploy(JOB, [part("plain", Plain), part("other", Plain)], deadline_s=120)
        first, other = await pids("plain"), await pids("other")
        await set_replicas(JOB, "plain", 2, deadline_s=30)
        async with asyncio.timeout(60):
            while len(more := await pids("plain")) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.1)  # Serve tells nobody when a replica is up
        assert first < more
        assert await pids("other") == other

    run_real(resize())


def test_a_part_that_does_not_get_ready_is_named(run_real: RunReal) -> None:
    with pytest.raises(StartupTimeout, match="parts-slow was not ready within 3 s: DEPLOYING"):
        run_real(deploy(JOB, [part("slow", Slow)], deadline_s=3))


def test_a_part_that_cannot_start_says_why(run_real: RunReal) -> None:
    with pytest.raises(
        InfrastructureError, match=r"(?s)parts-broken failed to start: .*loss.top_k is 99"
    ):
        run_real(deploy(JOB, [part("broken", Broken)], deadline_s=120))


def test_parts_are_named_after_their_job() -> None:
    assert application_name("job-7", "student") == "job-7-student"
