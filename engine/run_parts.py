"""What a run is put together from, and what it leaves in a checkpoint."""

from dataclasses import dataclass

import msgspec

from opdkit.engine.ledger import LedgerState
from opdkit.engine.progress_feed import ProgressFeed
from opdkit.protocols.messages import SampleMeta, StepPlan
from opdkit.protocols.roles import (
    Clock,
    MetricSink,
    PolicyTrainer,
    PromptSource,
    RolloutRunner,
    RunStore,
    SampleQueue,
    WeightPublisher,
)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a run drives."""

    prompts: PromptSource
    held_out: PromptSource | None
    runner: RolloutRunner
    queue: SampleQueue
    evaluation_queue: SampleQueue
    trainer: PolicyTrainer
    publisher: WeightPublisher
    store: RunStore
    sink: MetricSink
    feed: ProgressFeed
    clock: Clock


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint keeps of the engine."""

    step: int
    ledger: LedgerState


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A leased batch, on its way to the trainer."""

    plan: StepPlan
    samples: list[SampleMeta]
