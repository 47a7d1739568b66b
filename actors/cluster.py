# pyright: basic
"""The Ray cluster of a run: a private one on this machine, or one that is already there.

A private cluster has a secret of its own, without which its ports answer nothing, and is gone with
the run: Ray's processes die with the process that started them, whatever killed it.
"""

import math
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from opdkit.actors.guard import end_users
from opdkit.actors.ray_environment import CLUSTER_ENVIRONMENT
from opdkit.protocols.config import JobSpec
from opdkit.protocols.errors import ConfigError, StartupTimeout

MAX_START_ATTEMPTS = 3
OBJECT_STORE_BYTES = 128 << 20
"""Only control messages and small payloads pass through Ray's object store."""


@contextmanager
def cluster(spec: JobSpec, *, session: str) -> Iterator[None]:
    """Connect this process to the job's cluster; start and stop it if it is private.

    Raises:
        ConfigError: Ray was imported before a private cluster's settings could be made, or there
            is no cluster at the address.
        StartupTimeout: Ray did not start.
    """
    private = spec.cluster.address is None
    if private and "ray" in sys.modules:
        raise ConfigError(
            "cluster.address is none, but ray is already imported here: a private cluster's "
            "settings must come first; import ray later, or connect and set cluster.address"
        )
    own = _private_environment(session) if private else {}
    with environment({**CLUSTER_ENVIRONMENT, **own}):
        import ray

        # Ray prints what befalls its workers on stdout, where our reports go.
        ray._private.worker._worker_logs_enabled = False
        try:
            _connect(ray, spec, session)
            yield
        finally:
            ray.shutdown()
            ray._private.worker._worker_logs_enabled = True


def _connect(ray: Any, spec: JobSpec, session: str) -> None:
    options: dict[str, Any] = {
        "namespace": spec.job.name,
        "log_to_driver": False,
        "configure_logging": False,
    }
    if spec.cluster.address is not None:
        try:
            ray.init(address=spec.cluster.address, **options)
        except ConnectionError as error:
            raise ConfigError(
                f"cluster.address is {spec.cluster.address!r}, but no Ray cluster answers there: "
                "start one, or leave it out"
            ) from error
        return
    start_private(
        ray.init,
        session,
        address="local",
        num_cpus=math.ceil(max(os.cpu_count() or 1, num_cpus_of(spec))),
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        _temp_dir=session,
        _node_ip_address="127.0.0.1",
        **options,
    )


def start_private(start: Callable[..., object], session: str, **options: object) -> None:
    """Start a private cluster; again if a busy machine met Ray's own limit, which is fixed.

    Args:
        start: ``ray.init``.
        session: the folder below which the processes write, by which they are found.
        options: of ``ray.init``.

    Raises:
        StartupTimeout: it failed each time.
    """
    for attempts_left in reversed(range(MAX_START_ATTEMPTS)):
        try:
            start(**options)
            return
        except Exception as error:  # Ray raises no class of its own
            end_users([session], sparing=os.getpid())
            if not attempts_left:
                raise StartupTimeout(f"the private Ray cluster did not start: {error}") from error


def _private_environment(session: str) -> dict[str, str]:
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        # vLLM leaves its sockets and rendezvous files behind; here they vanish with the session.
        "TMPDIR": session,
    }


def num_cpus_of(spec: JobSpec) -> float:
    """Return the CPUs that the job reserves; a private cluster declares at least these."""
    engines = [spec.student, *spec.teachers]
    return (
        sum(engine.replicas * engine.placement.num_cpus for engine in engines)
        + spec.rollout.workers * spec.rollout.placement.num_cpus
        + spec.trainer.parallel.world_size * spec.trainer.placement.num_cpus
    )


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables, for this process and those it starts, and restore them."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
