"""What happens between the turns of a trajectory."""

from opdkit.engine.scheduling.contract import (
    ChatMessage,
    Choice,
    RolloutConfig,
    RolloutOutput,
    RolloutRequest,
    Scheduler,
)
from opdkit.engine.scheduling.registry import SCHEDULERS, make_scheduler

__all__ = [
    "SCHEDULERS",
    "ChatMessage",
    "Choice",
    "RolloutConfig",
    "RolloutOutput",
    "RolloutRequest",
    "Scheduler",
    "make_scheduler",
]
