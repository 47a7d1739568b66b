"""What one trainer rank is told at its start."""

from typing import Literal

import msgspec

from opdkit.protocols.config import JobSpec, LossSection, TrainerSection

DtypeName = Literal["float32", "bfloat16"]


class TrainerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The part of a job that a trainer rank works by, with the choices of ``auto`` made."""

    model: str
    """Folder in Hugging Face format that the weights start from."""
    dtype: DtypeName
    """Of the model's weights and products; bfloat16 keeps float32 master weights."""
    export_dtype: DtypeName
    """Of the student's engine."""
    export_dir: str
    """Folder of the exported weights; its owner removes it."""
    num_vocab: int
    """Logit columns that student and teacher share."""
    num_steps: int
    """Length of the learning-rate schedule."""
    max_sequence_tokens: int
    sampling_temperature: float
    """Of the log-probabilities that came with the samples."""
    seed: int
    trainer: TrainerSection
    loss: LossSection
    collective_timeout_s: float
    """Longest that a rank waits for the others within a step."""


def settings_from_job(
    spec: JobSpec, *, dtype: DtypeName, export_dtype: DtypeName, export_dir: str, num_vocab: int
) -> TrainerSettings:
    """Select from a job what its trainer ranks need."""
    return TrainerSettings(
        model=spec.student.model,
        dtype=dtype,
        export_dtype=export_dtype,
        export_dir=export_dir,
        num_vocab=num_vocab,
        num_steps=spec.pipeline.num_steps,
        max_sequence_tokens=spec.student.max_model_len,
        sampling_temperature=spec.rollout.temperature,
        seed=spec.job.seed,
        trainer=spec.trainer,
        loss=spec.loss,
        collective_timeout_s=spec.deadlines.step_s,
    )
