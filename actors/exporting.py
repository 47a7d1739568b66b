"""A run's newest checkpoint as a model folder, by one process and without a cluster."""

import pathlib
from typing import Any

from opdkit.actors.config_file import read_job
from opdkit.actors.hardware import resolve_dtype
from opdkit.actors.run_files import RunDirectory
from opdkit.protocols.errors import ConfigError


def export_run(run: pathlib.Path, directory: pathlib.Path) -> None:
    """Write the student of a run's newest checkpoint in Hugging Face format.

    Raises:
        ConfigError: there is no such run, it has no checkpoint, or the folder exists.
    """
