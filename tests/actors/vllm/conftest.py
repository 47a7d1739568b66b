# pyright: basic
"""What engines need that run below the test session itself, without Ray."""

import os
import sys
from collections.abc import Iterator

import pytest

from opdkit.actors.ray_environment import engine_environment
from opdkit.protocols.config import PlacementSection


@pytest.fixture(scope="session")
def vllm_environment() -> Iterator[None]:
    """Set the variables that a replica's process has; vLLM reads them when it is imported."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in engine_environment(PlacementSection(), is_eager=True).items():
            patch.setenv(name, value)
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        yield
