"""What may change between a run and its continuation."""

from typing import Any

import msgspec

from opdkit.protocols.config import JobSpec
from opdkit.protocols.config_wording import shown
from opdkit.protocols.errors import ConfigError

# Whatever is not named here decides what is trained on, or how, and stays as it was.
CHANGEABLE = (
    "job.name",
    "job.run_dir",
    "pipeline.num_steps",
    "pipeline.queue_mib",
    "pipeline.queue_samples",
    "data.held_out",
    "rollout.hook_timeout_s",
    "rollout.max_attempts",
    "rollout.on_hook_timeout",
    "rollout.placement",
    "rollout.workers",
    "trainer.microbatch_tokens",
    "trainer.parallel.data",
    "trainer.placement",
    "trainer.recompute",
    "checkpoint",
    "cluster",
    "deadlines",
    "evaluation",
    "logging",
    "simulation",
)
CHANGEABLE_ENGINE_FIELDS = (
    "enforce_eager",
    "kv_cache_mib",
    "max_batch_tokens",
    "max_num_seqs",
    "placement",
    "replicas",
)


def check_resume(saved: JobSpec, wanted: JobSpec) -> None:
    """Refuse to continue a run as a different one.

    Raises:
        ConfigError: naming the first field that may not change, and both values.
    """
    before, after = leaves_of(msgspec.to_builtins(saved)), leaves_of(msgspec.to_builtins(wanted))
    for path in [*before, *(path for path in after if path not in before)]:
        if not _is_same(before.get(path), after.get(path)) and not may_change(path):
            raise ConfigError(
                f"{path} is {shown(after.get(path))}, but this run began with "
                f"{shown(before.get(path))}: give it back, or start a new run "
                "in another job.run_dir"
            )


def may_change(path: str) -> bool:
    """Return whether a field may differ when a run is continued."""
    section, _, field = path.partition(".")
    if section == "student" or section.startswith("teachers["):
        return field.split(".")[0] in CHANGEABLE_ENGINE_FIELDS
    return any(path == name or path.startswith(f"{name}.") for name in CHANGEABLE)


def _is_same(before: object, after: object) -> bool:
    # As written, for the sake of NaN, which equals nothing.
    return before == after or repr(before) == repr(after)


def leaves_of(values: Any, path: str = "") -> dict[str, Any]:
    """Return the values of a tree that hold no others, by their paths (``teachers[0].model``)."""
    if isinstance(values, dict) and values:
        parts = {f"{path}.{key}" if path else str(key): item for key, item in values.items()}
    elif isinstance(values, list | tuple) and values and isinstance(values[0], dict):
        parts = {f"{path}[{index}]": item for index, item in enumerate(values)}
    else:
        return {path: values}
    leaves: dict[str, Any] = {}
    for here, item in parts.items():
        leaves.update(leaves_of(item, here))
    return leaves
