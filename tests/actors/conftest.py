# pyright: basic
"""One private Ray cluster and one event loop for all tests of real actors."""

import asyncio
import os
import sys
import warnings
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import uvloop

from opdkit.actors.ray_environment import CLUSTER_ENVIRONMENT

# Ray Serve reads them when it is imported, which the collection of tests does.
os.environ.update(CLUSTER_ENVIRONMENT)
with warnings.catch_warnings():
    # Serve's own models are written for an older pydantic.
    warnings.filterwarnings("ignore", message="Using extra keyword arguments on `Field`")
    import ray
    from ray import serve

NAMESPACE = "opdkit-tests"
CLUSTER_CPUS = 8
"""More than there are, so that every part finds a place."""

RunReal = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(scope="session")
def run_real() -> Iterator[RunReal]:
    """Run coroutines on a loop that lasts, as engines and Serve handles belong to one."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        yield runner.run


@pytest.fixture(scope="session")
def cluster(run_real: RunReal) -> Iterator[None]:
    """Run a cluster of this test session alone."""

    async def start() -> None:
        await asyncio.to_thread(
            ray.init,
            address="local",
            namespace=NAMESPACE,
            num_cpus=CLUSTER_CPUS,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}},
        )

    run_real(start())
    yield
    serve.shutdown()
    ray.shutdown()
