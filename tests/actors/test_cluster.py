"""A private cluster starts, if not at the first attempt."""

import pathlib
import subprocess

import pytest

from opdkit.actors.cluster import MAX_START_ATTEMPTS, start_private
from opdkit.protocols.errors import StartupTimeout
from tests.actors.test_scratch import WAIT_S, start_writer


class SlowRay:
    """Reaches its time limit some times, and leaves a process then."""

    def __init__(self, session: pathlib.Path, *, num_failures: int) -> None:
        self._session = session
        self._num_failures = num_failures
        self.left: list[subprocess.Popen[bytes]] = []

    def start(self, **options: object) -> None:
        """Start, or raise what Ray does."""
        assert options == {"num_cpus": 2}
        if len(self.left) < self._num_failures:
            self.left.append(start_writer(self._session / str(len(self.left))))
            raise Exception("the current node timed out")


def test_a_start_that_took_too_long_is_tried_again(tmp_path: pathlib.Path) -> None:
    ray = SlowRay(tmp_path, num_failures=MAX_START_ATTEMPTS - 1)
    start_private(ray.start, str(tmp_path), num_cpus=2)
    assert len(ray.left) == MAX_START_ATTEMPTS - 1
    assert all(process.wait(WAIT_S) for process in ray.left)


def test_a_cluster_that_never_starts_is_given_up(tmp_path: pathlib.Path) -> None:
    ray = SlowRay(tmp_path, num_failures=MAX_START_ATTEMPTS)
    with pytest.raises(StartupTimeout, match="did not start: the current node timed out"):
        start_private(ray.start, str(tmp_path), num_cpus=2)
    assert all(process.wait(WAIT_S) for process in ray.left)
