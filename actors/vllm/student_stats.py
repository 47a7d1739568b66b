"""What a student replica tells of itself."""

from opdkit.protocols.messages import Message, StageMeter, WeightManifest


class StudentStats(Message, frozen=True, kw_only=True):
    """Counters of one student replica since its start."""

    meter: StageMeter
    served: WeightManifest | None
    """The weights that it samples from; None: none were applied yet."""
    num_unfinished: int
    """Requests that the engine holds now."""
    num_cached_tokens: int
    """Prompt tokens that were found in the prefix cache."""
    num_updates: int
    last_update_s: float
    """Time from closing the gate to resuming, of the last successful update."""
