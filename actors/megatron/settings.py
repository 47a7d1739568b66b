"""What one trainer rank is told at its start."""

import msgspec

from opdkit.actors.files.model_files import read_model
from opdkit.actors.hardware import DtypeName, resolve_dtype
from opdkit.protocols.config import JobSpec, LossSection, TrainerSection


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


def settings_from_job(spec: JobSpec, *, export_dir: str) -> TrainerSettings:
    """Select from a job what its trainer ranks need; ``auto`` is decided on this machine.

    Raises:
        ConfigError: a model folder is not complete.
    """
    student = read_model(spec.student.model, field="student.model")
    teacher = read_model(spec.teachers[0].model, field="teachers[0].model")
    return TrainerSettings(
        model=spec.student.model,
        dtype=resolve_dtype(spec.trainer.dtype),
        export_dtype=resolve_dtype(spec.student.dtype),
        export_dir=export_dir,
        num_vocab=min(student.shape.logit_width, teacher.shape.logit_width),
        num_steps=spec.pipeline.num_steps,
        max_sequence_tokens=spec.student.max_model_len,
        sampling_temperature=spec.rollout.temperature,
        seed=spec.job.seed,
        trainer=spec.trainer,
        loss=spec.loss,
        collective_timeout_s=spec.deadlines.step_s,
    )
