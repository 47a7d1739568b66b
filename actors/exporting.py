# pyright: basic
"""A run's newest checkpoint as a model folder, by this process alone and without a cluster."""

import pathlib
import warnings

import msgspec

from opdkit.actors.files.config_file import read_job
from opdkit.actors.files.run_files import RunDirectory
from opdkit.actors.megatron.settings import TrainerSettings, settings_from_job
from opdkit.protocols.config import ParallelSection
from opdkit.protocols.errors import ConfigError


def export_run(run: pathlib.Path, directory: pathlib.Path) -> None:
    """Write the student of a run's newest checkpoint in Hugging Face format.

    Raises:
        ConfigError: there is no such run, it has no checkpoint yet, or the target is a file or a
            folder that is not empty.
    """
    if not (run / "job.yaml").is_file():
        raise ConfigError(f"RUN is {str(run)!r}, but there is no job.yaml in it")
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"DIR is {str(directory)!r}, but that is a file")
    if directory.exists() and any(directory.iterdir()):
        raise ConfigError(f"DIR is {str(directory)!r}, but it exists and is not empty")
    spec = read_job(run / "job.yaml")
    checkpoint = RunDirectory(run, keep=spec.checkpoint.keep).newest()
    if checkpoint is None:
        raise ConfigError(f"RUN is {str(run)!r}, but it has no complete checkpoint yet")
    settings = settings_from_job(spec, export_dir=str(directory))
    alone = msgspec.structs.replace(settings.trainer, parallel=ParallelSection())
    with warnings.catch_warnings():
        # Megatron names every optional package that it does without, and its own deprecations.
        warnings.simplefilter("ignore")
        _export(
            msgspec.structs.replace(settings, trainer=alone), checkpoint.trainer_path, directory
        )


def _export(settings: TrainerSettings, checkpoint: str, directory: pathlib.Path) -> None:
    from torch.distributed import HashStore  # type: ignore[attr-defined]  # not in its __all__

    from opdkit.actors.megatron.session import MegatronSession

    session = MegatronSession(settings, rank=0, store=HashStore())
    try:
        session.load(checkpoint)
        session.save_hf(str(directory))
    finally:
        session.close()
