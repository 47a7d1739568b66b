# pyright: basic
"""The Ray Serve applications of a job: one for each role, so that each is changed alone.

A second ``serve.run`` of an application restarts all its replicas, and the declarative interface
describes the whole cluster, other jobs included. So each application is run once, and its number
of replicas is set through the controller, which keeps those that stay.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ray import serve
from ray.serve._private.common import DeploymentID
from ray.serve.context import _get_global_client
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview

from opdkit.actors.board_access import BoardAddress
from opdkit.actors.calls import call
from opdkit.actors.ray_environment import engine_environment
from opdkit.actors.vllm.student_replica import StudentReplica
from opdkit.actors.vllm.teacher_replica import TeacherReplica
from opdkit.protocols.config import LossSection, PlacementSection, StudentSection, TeacherSection
from opdkit.protocols.errors import InfrastructureError, StartupTimeout

STUDENT = "student"
TEACHER = "teacher"

HEALTH_CHECK_PERIOD_S = 2.0
HEALTH_CHECK_TIMEOUT_S = 120.0
"""Long, since a laptop's cores may be taken; a dead engine is reported, not waited for."""
DRAIN_S = 5.0
"""What a replica that is to go may take for the calls it has; the rest go elsewhere."""
MAX_START_ATTEMPTS = 3
STATUS_PERIOD_S = 0.5
STICKY_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"


@dataclass(frozen=True, kw_only=True)
class Part:
    """One application with one deployment."""

    role: str
    replica_class: type
    arguments: Mapping[str, Any]
    """Of the class, by name."""
    num_replicas: int
    placement: PlacementSection
    max_ongoing_requests: int
    """Calls that one replica takes at once; more wait at the caller."""
    environment: Mapping[str, str] = field(default_factory=dict)
    is_sticky: bool = False
    """Calls of one session go to one replica."""


def student_part(section: StudentSection, *, seed: int, board: BoardAddress) -> Part:
    """Describe the student's application."""
    return Part(
        role=STUDENT,
        replica_class=StudentReplica,
        arguments={"section": section, "seed": seed, "board": board},
        num_replicas=section.replicas,
        placement=section.placement,
        # Above what the engine runs at once, so that it always has somebody to begin with.
        max_ongoing_requests=4 * section.max_num_seqs,
        environment=engine_environment(section.placement, is_eager=section.enforce_eager),
        is_sticky=True,
    )


def teacher_part(section: TeacherSection, *, loss: LossSection, vocab_size: int) -> Part:
    """Describe a teacher's application."""
    return Part(
        role=TEACHER,
        replica_class=TeacherReplica,
        arguments={"section": section, "loss": loss, "vocab_size": vocab_size},
        num_replicas=section.replicas,
        placement=section.placement,
        max_ongoing_requests=2 * section.max_num_seqs,
        environment=engine_environment(section.placement, is_eager=section.enforce_eager),
    )


def application_name(job: str, role: str) -> str:
    """Return the name under which a part of a job is deployed."""
    return f"{job}-{role}"


async def deploy(job: str, parts: Sequence[Part], *, deadline_s: float) -> dict[str, Any]:
    """Start all parts at once and wait until all their replicas serve.

    Returns:
        The Serve handle of each role; to be used on this event loop only.

    Raises:
        StartupTimeout: a part was not ready in time. The message names it, and what Serve says.
        InfrastructureError: a part cannot start. The message has Serve's account of why.
    """
    deadline = asyncio.get_running_loop().time() + deadline_s
    await asyncio.to_thread(_run, job, parts)
    for part in parts:
        await _until_running(application_name(job, part.role), deadline, deadline_s)
    return {part.role: await handle_of(job, part.role) for part in parts}


async def handle_of(job: str, role: str) -> Any:
    """Return the Serve handle of a part that is deployed, for this event loop."""
    return await asyncio.to_thread(serve.get_deployment_handle, role, application_name(job, role))


async def set_replicas(job: str, role: str, num_replicas: int, *, deadline_s: float) -> None:
    """Ask for another number of replicas; those that stay go on undisturbed."""
    client = await asyncio.to_thread(_client)
    deployment = DeploymentID(name=role, app_name=application_name(job, role))
    await call(
        lambda: client._controller.update_deployment_replicas.remote(deployment, num_replicas),
        name=f"resize {deployment}",
        deadline_s=deadline_s,
    )


async def remove(job: str, roles: Sequence[str]) -> None:
    """Take parts down and wait until their replicas are gone. Unknown ones are ignored."""
    names = [application_name(job, role) for role in roles]
    await asyncio.to_thread(lambda: _client().delete_apps(names, blocking=True))


def _client() -> Any:
    return _get_global_client()


def _run(job: str, parts: Sequence[Part]) -> None:
    # Without a proxy: nothing of a job is reached over HTTP. A Serve that runs stays as it is.
    serve.start(proxy_location="Disabled")
    serve.run_many(
        [
            serve.RunTarget(
                target=_deployment(part).bind(**part.arguments),
                name=application_name(job, part.role),
                route_prefix=None,
                external_scaler_enabled=True,
            )
            for part in parts
        ],
        wait_for_ingress_deployment_creation=True,
        wait_for_applications_running=False,
    )


def _deployment(part: Part) -> Any:
    options: dict[str, Any] = {}
    if part.is_sticky:
        options["request_router_config"] = {"request_router_class": STICKY_ROUTER}
    return serve.deployment(
        part.replica_class,
        name=part.role,
        num_replicas=part.num_replicas,
        max_ongoing_requests=part.max_ongoing_requests,
        ray_actor_options={
            "num_cpus": part.placement.num_cpus,
            "num_gpus": part.placement.num_gpus,
            "runtime_env": {"env_vars": dict(part.environment)},
        },
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_S,
        graceful_shutdown_timeout_s=DRAIN_S,
        graceful_shutdown_wait_loop_s=0.1,
        max_constructor_retry_count=MAX_START_ATTEMPTS,
        **options,
    )


async def _until_running(name: str, deadline: float, deadline_s: float) -> None:
    """Wait for all replicas of an application, until ``deadline`` on the loop's clock.

    Timed looks, because Serve has no event for a deployment that cannot start: a call to it would
    wait for ever. This is at start-up only.
    """
    while True:
        application = (await asyncio.to_thread(serve.status)).applications[name]
        if application.status is ApplicationStatus.RUNNING:
            return
        if application.status is ApplicationStatus.DEPLOY_FAILED:
            raise InfrastructureError(f"{name} failed to start: {_text_of(application)}")
        if asyncio.get_running_loop().time() > deadline:
            raise StartupTimeout(
                f"{name} was not ready within {deadline_s:g} s: {_text_of(application)}"
            )
        await asyncio.sleep(STATUS_PERIOD_S)


def _text_of(application: ApplicationStatusOverview) -> str:
    """Return what Serve says of an application and its deployments."""
    parts = [f"{application.status.value}: {application.message}"]
    parts += [
        f"{name}: {deployment.status.value}: {deployment.message}"
        for name, deployment in application.deployments.items()
    ]
    return "; ".join(parts)
