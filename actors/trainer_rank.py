# pyright: basic
"""One trainer rank: an asynchronous shell, in its own process, around blocking Megatron calls.

All that Megatron does happens in one thread, so that its calls keep their order and the event
loop stays free: while a step runs, the next one's payloads arrive. torch and Megatron are imported
in that thread too; a process that only starts ranks loads neither.
"""

import asyncio
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec
import ray

from opdkit.actors.megatron.settings import TrainerSettings
from opdkit.protocols.errors import TrainerError
from opdkit.protocols.ids import PolicyVersion
from opdkit.protocols.messages import (
    EvaluationReport,
    Sample,
    StepPlan,
    StepReport,
    WeightManifest,
)

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in its __all__

    from opdkit.actors.megatron.session import MegatronSession

R = TypeVar("R")


class PayloadSource(Protocol):
    """The part of a ``SampleQueue`` that a rank uses."""

    async def fetch(self, sample_ids: Sequence[str]) -> list[bytes]:
        """Return the payloads of leased samples, in the order asked."""
        ...


class TrainerRank:
    """A member of the trainer group. Every rank gets the same calls in the same order.

    Plans come as msgpack: a plan is hundreds of small objects, which pickle is slow at.
    """

    def __init__(self, rank: int, settings: TrainerSettings, payloads: PayloadSource) -> None:
        self._rank = rank
        self._settings = settings
        self._payloads = payloads
        self._data_rank = rank // settings.trainer.parallel.tensor
        self._samples: dict[str, Sample] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="megatron")
        self._store: TCPStore | None = None
        self._session: MegatronSession | None = None

    async def open_meeting_point(self) -> tuple[str, int]:
        """Return host and port where the ranks meet. For rank 0, before any ``start``."""
        host: str = ray.util.get_node_ip_address()
        self._store = await self._in_thread(self._open_store, host, 0)
        return host, self._store.port

    async def start(self, host: str, port: int) -> None:
        """Join the group and read the weights; returns when all ranks did.

        Raises:
            ConfigError: the model, or how it is to be split, is not supported.
        """
        self._session = await self._in_thread(self._open_session, host, port)

    async def prefetch(self, encoded_plan: bytes) -> None:
        """Fetch this rank's payloads of a plan, unless they are here."""
        await self._fetch(_decode_plan(encoded_plan))

    async def train(self, encoded_plan: bytes) -> StepReport:
        """Take one optimizer step."""
        plan = _decode_plan(encoded_plan)
        due_s = time.perf_counter()
        await self._fetch(plan)
        fetch_s = time.perf_counter() - due_s
        report = await self._in_thread(self._opened().train, plan, dict(self._samples))
        self._forget(plan)
        return msgspec.structs.replace(report, fetch_s=fetch_s)

    async def evaluate(self, encoded_plan: bytes) -> EvaluationReport:
        """Measure the divergence on a plan."""
        plan = _decode_plan(encoded_plan)
        await self._fetch(plan)
        report = await self._in_thread(self._opened().evaluate, plan, dict(self._samples))
        self._forget(plan)
        return report

    async def export(self, policy_version: PolicyVersion) -> WeightManifest | None:
        """Write the weights for the engines; rank 0 returns the manifest."""
        return await self._in_thread(self._opened().export, policy_version)

    async def save_hf(self, folder: str) -> None:
        """Write a model folder in Hugging Face format."""
        await self._in_thread(self._opened().save_hf, folder)

    async def save(self, path: str) -> None:
        """Write a checkpoint."""
        await self._in_thread(self._opened().save, path)

    async def load(self, path: str) -> None:
        """Restore a checkpoint, and forget payloads: they may be leased to others now."""
        await self._in_thread(self._opened().load, path)
        self._samples.clear()

    def _opened(self) -> "MegatronSession":
        if self._session is None:
            raise TrainerError(f"trainer rank {self._rank} was called before it was started")
        return self._session

    async def _in_thread(self, function: Callable[..., R], *arguments: object) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    async def _fetch(self, plan: StepPlan) -> None:
        wanted = [name for name in self._planned(plan) if name not in self._samples]
        if not wanted:
            return
        payloads = await self._payloads.fetch(wanted)
        for sample_id, payload in zip(wanted, payloads, strict=True):
            self._samples[sample_id] = msgspec.msgpack.decode(payload, type=Sample)

    def _forget(self, plan: StepPlan) -> None:
        for sample_id in self._planned(plan):
            self._samples.pop(sample_id, None)

    def _planned(self, plan: StepPlan) -> list[str]:
        refs = (ref for refs in plan.microbatches[self._data_rank] for ref in refs)
        return list(dict.fromkeys(ref.sample_id for ref in refs))

    def _open_store(self, host: str, port: int) -> "TCPStore":
        from opdkit.actors.megatron.meeting_point import open_store

        return open_store(
            host,
            port=port,
            world_size=self._settings.trainer.parallel.world_size,
            timeout_s=self._settings.collective_timeout_s,
        )

    def _open_session(self, host: str, port: int) -> "MegatronSession":
        with warnings.catch_warnings():
            # Megatron names every optional package that it does without.
            warnings.simplefilter("ignore")
            from opdkit.actors.megatron.session import MegatronSession

        store = self._store or self._open_store(host, port)
        return MegatronSession(self._settings, rank=self._rank, store=store)


def _decode_plan(encoded_plan: bytes) -> StepPlan:
    return msgspec.msgpack.decode(encoded_plan, type=StepPlan)
