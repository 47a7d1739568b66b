"""Every async test runs on asyncio and on uvloop, in debug, with blocking calls forbidden."""

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import uvloop
from blockbuster import blockbuster_ctx

# Before torch is imported. Two threads that spin on a core that others use are slower than one by
# an order of magnitude.
os.environ.setdefault("OMP_NUM_THREADS", "1")

Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    """Run one coroutine to completion on a fresh loop, then check no task is left."""
    with (
        blockbuster_ctx("opdkit"),
        asyncio.Runner(debug=True, loop_factory=request.param) as runner,
    ):
        yield runner.run
        assert not asyncio.all_tasks(runner.get_loop())
