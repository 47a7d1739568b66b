"""opdkit: asynchronous on-policy distillation of language models.

``JobSpec`` describes a job; ``run`` runs it here, in the foreground.
"""

from opdkit.protocols.config import JobSpec

__all__ = ["JobSpec", "__version__"]
__version__ = "0.1.0"
