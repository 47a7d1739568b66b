# pyright: basic
"""All that one rank does with Megatron-Core: blocking calls, to be made from one thread.

Every rank of the group makes the same calls in the same order, for each is a collective.
"""

from collections.abc import Mapping

import torch
from megatron.core import parallel_state
from torch.distributed import Store  # type: ignore[attr-defined]  # not in its __all__

from opdkit.actors.megatron import checkpointing, export, parallel, training_step
from opdkit.actors.megatron.batches import MicroBatch, build_microbatches
from opdkit.actors.megatron.cpu_support import device_mode
from opdkit.actors.megatron.model import build_student
from opdkit.actors.megatron.settings import TrainerSettings
from opdkit.protocols.ids import PolicyVersion
from opdkit.protocols.messages import (
    EvaluationReport,
    Sample,
    StepPlan,
    StepReport,
    WeightManifest,
)


class MegatronSession:
    """A rank's place in the group, and its part of the student."""

    def __init__(self, settings: TrainerSettings, *, rank: int, store: Store) -> None:
        """Join the group and read the weights.

        Raises:
            ConfigError: the model, or how it is to be split, is not supported.
        """
        torch.set_num_threads(settings.trainer.placement.num_threads)
        self._settings = settings
        parallel.join(
            store,
            rank=rank,
            parallel=settings.trainer.parallel,
            seed=settings.seed,
            timeout_s=settings.collective_timeout_s,
        )
        with device_mode():
            self.student = build_student(settings)

    def train(self, plan: StepPlan, samples: Mapping[str, Sample]) -> StepReport:
        """Take one optimizer step on this rank's part of the plan."""
        with device_mode():
            return training_step.take_step(self.student, self._batches(plan, samples), plan)

    def evaluate(self, plan: StepPlan, samples: Mapping[str, Sample]) -> EvaluationReport:
        """Measure the divergence on the plan."""
        with device_mode():
            return training_step.evaluate(self.student, self._batches(plan, samples), plan)

    def export(self, policy_version: PolicyVersion) -> WeightManifest | None:
        """Write the weights for the engines; rank 0 returns the manifest."""
        with device_mode():
            return export.export_weights(self.student, policy_version)

    def save_hf(self, folder: str) -> None:
        """Write a model folder in Hugging Face format."""
        with device_mode():
            export.save_hf(self.student, folder)

    def save(self, path: str) -> None:
        """Write a checkpoint."""
        with device_mode():
            checkpointing.save_checkpoint(self.student, path)

    def load(self, path: str) -> None:
        """Restore a checkpoint."""
        with device_mode():
            checkpointing.load_checkpoint(self.student, path)

    def close(self) -> None:
        """Leave the group."""
        parallel.leave()

    def _batches(self, plan: StepPlan, samples: Mapping[str, Sample]) -> list[MicroBatch]:
        section = self._settings.trainer.parallel
        return build_microbatches(
            plan,
            data_rank=parallel_state.get_data_parallel_rank(),
            samples=samples,
            loss=self._settings.loss,
            num_vocab=self._settings.num_vocab,
            token_multiple=section.tensor if section.sequence else 1,
        )
