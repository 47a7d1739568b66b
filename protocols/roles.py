"""The parts that the engine drives, whatever they are made of.

Real ones are in ``opdkit.actors``; simulated and scripted ones in ``opdkit.engine.testing``.
Every method may raise ``InfrastructureError``. Every waiting method may be cancelled and then
leaves its other side as if it had not been called.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol

from opdkit.protocols.ids import Ordinal, PolicyVersion
from opdkit.protocols.messages import (
    DeadSample,
    Demand,
    EvaluationReport,
    GenerateRequest,
    RolloutOutcome,
    RolloutTask,
    RolloutWorkerReport,
    SampleMeta,
    ScoreRequest,
    StepPlan,
    StepReport,
    TeacherScores,
    TokenChunk,
    WeightManifest,
)


class Clock(Protocol):
    """Monotonic seconds."""

    def now(self) -> float: ...


class StudentSampler(Protocol):
    """The student's engines."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Stream the reply. Closing or cancelling the iterator frees the engine's request.

        Raises:
            PromptError: the history leaves no room for a token.
            ReplicaLost: the replica died; the chunks already given stay valid.
        """
        ...


class TeacherScorer(Protocol):
    """The teachers' engines."""

    async def score(self, request: ScoreRequest) -> TeacherScores:
        """Score the supervised positions of one sequence.

        Raises:
            TeacherAlignmentError: the ids that came back are not those sent.
        """
        ...


class ChatTemplate(Protocol):
    """The student's tokenizer, as far as rollouts need it. Blocking; short calls."""

    def render(
        self, messages: Sequence[Mapping[str, object]], *, tools: Sequence[object] = ()
    ) -> list[int]:
        """Return the ids of a conversation, up to where the assistant is to speak."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the ids of plain text, special tokens not interpreted."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens left out."""
        ...


class SampleSink(Protocol):
    """Where finished samples go."""

    async def put(self, meta: SampleMeta, payload: bytes) -> None:
        """Hand over a sample, waiting for room. A second put of the same id changes nothing.

        Raises:
            QueueClosed: the queue was closed first.
        """
        ...


class SampleQueue(SampleSink, Protocol):
    """Bounded hand-off of finished samples to the trainer."""

    async def set_demand(self, demand: Demand) -> None:
        """State what the next batch must hold; a waiting lease sees it at once."""
        ...

    async def lease(self) -> list[SampleMeta]:
        """Wait until the demand can be met, and lease that batch: the earliest due first.

        A demand of 0 gives an empty batch, also to a lease that waits already.
        """
        ...

    async def fetch(self, sample_ids: Sequence[str]) -> list[bytes]:
        """Return the payloads of leased samples, in the order asked."""
        ...

    async def acknowledge(self, sample_ids: Sequence[str]) -> None:
        """Forget leased samples: they are trained, and their ids are refused from now on."""
        ...

    async def return_leases(self) -> None:
        """Put every leased sample back in its old place."""
        ...

    async def close(self) -> None:
        """Wake every waiter with QueueClosed. Idempotent."""
        ...


class RolloutRunner(Protocol):
    """Makes trajectories, scores them and puts them into the queue."""

    async def run(self, task: RolloutTask) -> RolloutOutcome:
        """Run one trajectory to its end: queued (``SampleMeta``) or given up (``DeadSample``)."""
        ...

    async def report(self) -> RolloutWorkerReport:
        """Return the counters of all workers together."""
        ...


class PolicyTrainer(Protocol):
    """The group of trainer ranks. Calls come one at a time, but ``prefetch`` at any time."""

    async def prefetch(self, plan: StepPlan) -> None:
        """Bring the plan's payloads to the ranks that will train on them."""
        ...

    async def train(self, plan: StepPlan) -> StepReport:
        """Take one optimizer step on a prefetched plan.

        Raises:
            TrainerError: a rank failed or died; no rank's weights can be trusted.
        """
        ...

    async def evaluate(self, plan: StepPlan) -> EvaluationReport:
        """Measure the divergence on a prefetched plan; change nothing."""
        ...

    async def export(self, policy_version: PolicyVersion) -> WeightManifest:
        """Copy the current weights to where replicas can read them."""
        ...

    async def save(self, path: str) -> None:
        """Write model, optimizer, schedule and RNG state into a new directory."""
        ...

    async def load(self, path: str) -> None:
        """Restore what ``save`` wrote, at any data-parallel size."""
        ...


class WeightPublisher(Protocol):
    """Brings weights to every student replica, present and future."""

    async def publish(self, manifest: WeightManifest) -> None:
        """Return when every live replica serves this version and has proved it.

        Raises:
            WeightUpdateError: a replica refused the weights, or proved others.
        """
        ...


class PromptSource(Protocol):
    """The dataset, in its shuffled order."""

    def __len__(self) -> int:
        """Number of rows in one epoch."""
        ...

    @property
    def num_ordinals(self) -> int | None:
        """Number of samples in all epochs; None: without end."""
        ...

    def row(self, ordinal: Ordinal) -> tuple[str, dict[str, object]]:
        """Return (prompt id, columns) of the row drawn at this place.

        Raises:
            PromptError: the row is no usable prompt. The message names file and line.
        """
        ...


class RunStore(Protocol):
    """Durable state of a run. Writes are atomic: after a crash the last complete one is read."""

    async def save(self, step: int, state: bytes, trainer: PolicyTrainer) -> None:
        """Write a checkpoint: the trainer's part and the engine's ``state``; drop the oldest."""
        ...

    async def bury(self, dead: DeadSample) -> None:
        """Append to the dead letters."""
        ...


class MetricSink(Protocol):
    """Receives one flat record a step."""

    async def write(self, kind: str, step: int, values: Mapping[str, float | int | str]) -> None:
        """Record named values; ``kind`` is ``step``, ``evaluation`` or ``event``."""
        ...
