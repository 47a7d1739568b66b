# pyright: basic
"""The group of trainer ranks, one Ray actor each, behind the role ``PolicyTrainer``.

A step is a collective: when one rank fails, the others wait for it in vain or fail on its closed
connections. So the first failure ends the call, after a short wait in which the rank that is to
blame may still be found dead. After that the group is of no use but for ``shutdown``; ``start``
then makes a new one.
"""

import asyncio
from typing import Any, Self

import msgspec
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from opdkit.actors.megatron.settings import TrainerSettings
from opdkit.actors.trainer_rank import PayloadSource, TrainerRank
from opdkit.protocols.config import DeadlineSection
from opdkit.protocols.errors import ConfigError, QueueClosed, StartupTimeout, TrainerError
from opdkit.protocols.ids import PolicyVersion
from opdkit.protocols.messages import EvaluationReport, StepPlan, StepReport, WeightManifest

BLAME_S = 3.0
"""After a failure, how long to wait for others: Ray takes a second or two to notice a death."""

PASSED_ON = (ConfigError, QueueClosed)
"""Errors of a rank that are nobody's failure: they reach the caller as they are."""


class TrainerGroup:
    """Starts the ranks and makes each call on all of them."""

    def __init__(
        self, settings: TrainerSettings, *, payloads: PayloadSource, deadlines: DeadlineSection
    ) -> None:
        """Describe the group; ``start`` makes it.

        Args:
            settings: of every rank.
            payloads: where ranks fetch samples; it is pickled into each rank's process.
            deadlines: of the calls.
        """
        self._settings = settings
        self._payloads = payloads
        self._deadlines = deadlines
        # Ray's handles have no static type.
        self._ranks: list[Any] = []

    async def start(self) -> Self:
        """Start the processes, connect them and read the weights.

        Raises:
            StartupTimeout: they were not ready by the deadline.
            TrainerError: a rank failed.
            ConfigError: the model, or how it is to be split, is not supported.
        """
        assert not self._ranks, "the group is already started"
        deadline_s = self._deadlines.startup_s
        try:
            async with asyncio.timeout(deadline_s):
                self._ranks = await asyncio.to_thread(self._make_ranks)
                first = self._ranks[:1]
                [(host, port)] = await self._call(first, "open_meeting_point", None)
                await self._call(self._ranks, "start", None, host, port)
        except TimeoutError as error:
            await self.shutdown()
            raise StartupTimeout(
                f"the trainer's {self._settings.trainer.parallel.world_size} ranks were not ready "
                f"within {deadline_s:g} s (deadlines.startup_s)"
            ) from error
        except BaseException:
            await self.shutdown()
            raise
        return self

    async def shutdown(self) -> None:
        """Kill every rank. Idempotent."""
        ranks, self._ranks = self._ranks, []
        await asyncio.to_thread(_kill, ranks)

    async def prefetch(self, plan: StepPlan) -> None:
        """Bring the plan's payloads to the ranks that will train on them."""
        await self._on_all("prefetch", self._deadlines.step_s, msgspec.msgpack.encode(plan))

    async def train(self, plan: StepPlan) -> StepReport:
        """Take one optimizer step; times are those of the slowest rank."""
        encoded = msgspec.msgpack.encode(plan)
        reports: list[StepReport] = await self._on_all("train", self._deadlines.step_s, encoded)
        return msgspec.structs.replace(
            reports[0],
            step_s=max(report.step_s for report in reports),
            fetch_s=max(report.fetch_s for report in reports),
        )

    async def evaluate(self, plan: StepPlan) -> EvaluationReport:
        """Measure the divergence on a plan; change nothing."""
        encoded = msgspec.msgpack.encode(plan)
        reports: list[EvaluationReport] = await self._on_all(
            "evaluate", self._deadlines.step_s, encoded
        )
        return reports[0]

    async def export(self, policy_version: PolicyVersion) -> WeightManifest:
        """Copy the current weights to where replicas can read them."""
        manifests = await self._on_all("export", self._deadlines.publish_s, policy_version)
        manifest: WeightManifest = manifests[0]
        return manifest

    async def save(self, path: str) -> None:
        """Write model, optimizer, schedule and random states into a new directory."""
        await self._on_all("save", self._deadlines.checkpoint_s, path)

    async def load(self, path: str) -> None:
        """Restore what ``save`` wrote, at any data-parallel size."""
        await self._on_all("load", self._deadlines.checkpoint_s, path)

    async def save_hf(self, folder: str) -> None:
        """Write a folder in Hugging Face format that transformers and vLLM load."""
        await self._on_all("save_hf", self._deadlines.checkpoint_s, folder)

    def _make_ranks(self) -> list[Any]:
        placement = self._settings.trainer.placement
        actor_class = ray.remote(TrainerRank).options(
            num_cpus=placement.num_cpus,
            num_gpus=placement.num_gpus,
            runtime_env={
                "env_vars": {
                    "OMP_NUM_THREADS": str(placement.num_threads),
                    # A CPU's products in bfloat16 leave a kernel and its scratch memory for every
                    # shape; with packs of all lengths, a thousand of each would be kept.
                    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16",
                    "LRU_CACHE_CAPACITY": "16",
                    # Megatron counts on one queue when it overlaps communication and arithmetic.
                    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
                }
            },
        )
        return [
            actor_class.remote(rank, self._settings, self._payloads)
            for rank in range(self._settings.trainer.parallel.world_size)
        ]

    async def _on_all(self, method: str, deadline_s: float, *arguments: object) -> list[Any]:
        if not self._ranks:
            raise TrainerError(f"trainer {method}: the group is not started")
        return await self._call(self._ranks, method, deadline_s, *arguments)

    async def _call(
        self, ranks: list[Any], method: str, deadline_s: float | None, *arguments: object
    ) -> list[Any]:
        """Call a method on some ranks at once; ``deadline_s`` None: the caller has a deadline.

        Raises:
            TrainerError: a rank failed, died or did not answer. The message names it.
        """
        results: dict[int, Any] = {}
        failures: dict[int, RayError] = {}
        now = asyncio.get_running_loop().time

        async def call_one(rank: int, actor: Any) -> None:
            try:
                results[rank] = await _finish(getattr(actor, method).remote(*arguments))
            except RayError as error:
                failures[rank] = error
                if not limit.expired():
                    limit.reschedule(min(limit.when() or float("inf"), now() + BLAME_S))

        limit = asyncio.timeout(deadline_s)
        try:
            async with limit, asyncio.TaskGroup() as tasks:
                for rank, actor in enumerate(ranks):
                    tasks.create_task(call_one(rank, actor), name=f"trainer-{method}-{rank}")
        except TimeoutError as error:
            if not failures:
                silent = [rank for rank in range(len(ranks)) if rank not in results]
                raise TrainerError(
                    f"trainer {method}: no answer from rank {_listed(silent)} "
                    f"within {deadline_s:g} s"
                ) from error
        if failures:
            _raise_failure(method, failures)
        return [results[rank] for rank in range(len(ranks))]


async def _finish(reference: Any) -> Any:
    try:
        return await reference
    except asyncio.CancelledError:
        # Ray lets go of a caller that stops waiting, but not of the call.
        ray.cancel(reference)
        raise


def _raise_failure(method: str, failures: dict[int, RayError]) -> None:
    for error in failures.values():
        if isinstance(error, RayTaskError) and isinstance(error.cause, PASSED_ON):
            raise error.cause from error
    # A rank that died comes first: others fail on its closed connections.
    ordered = sorted(failures.items(), key=lambda item: not isinstance(item[1], RayActorError))
    reasons = "; ".join(f"rank {rank}: {_reason(error)}" for rank, error in ordered)
    raise TrainerError(f"trainer {method}: {reasons}") from ordered[0][1]


def _reason(error: RayError) -> str:
    if isinstance(error, RayTaskError):
        return f"{type(error.cause).__name__}: {error.cause}"
    if isinstance(error, RayActorError):
        return f"died: {str(error).splitlines()[0]}"
    return f"{type(error).__name__}: {error}"


def _listed(ranks: list[int]) -> str:
    return ", ".join(str(rank) for rank in ranks)


def _kill(ranks: list[Any]) -> None:
    for actor in ranks:
        ray.kill(actor)
