"""opdkit: asynchronous on-policy distillation of language models.

``read_job`` reads a job's YAML, ``JobSpec`` describes one, ``run`` runs it here::

    summary = opdkit.run(opdkit.read_job("examples/smollm2.yaml"))
"""

import importlib
from typing import TYPE_CHECKING, Any

from opdkit.protocols.config import JobSpec

if TYPE_CHECKING:
    from opdkit.actors.files.config_file import read_job
    from opdkit.actors.foreground import run

__all__ = ["JobSpec", "__version__", "read_job", "run"]
__version__ = "0.1.0"

_LAZY = {"read_job": "opdkit.actors.files.config_file", "run": "opdkit.actors.foreground"}


def __getattr__(name: str) -> Any:
    """Import ``run`` and ``read_job`` when they are first used: they load much more than a job."""
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
