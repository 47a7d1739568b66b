"""The parts of a run, scripted: a whole job in milliseconds, without a model or a cluster.

They last as long as the test says: a ``Pause`` is awaited where a real part would work. With
``loop_turns`` time is counted in turns of the event loop, so a schedule repeats exactly.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection, Mapping

import msgspec

from opdkit.engine.testing_messages import (
    PROMPT_TOKENS,
    make_dead,
    make_meta,
    make_report,
    planned_samples,
)
from opdkit.protocols.errors import PromptError, TrainerError
from opdkit.protocols.ids import Ordinal, PolicyVersion
from opdkit.protocols.messages import (
    DeadSample,
    EvaluationReport,
    RolloutOutcome,
    RolloutTask,
    RolloutWorkerReport,
    StageMeter,
    StepPlan,
    StepReport,
    WeightManifest,
)
from opdkit.protocols.roles import PolicyTrainer, SampleQueue

Pause = Callable[[], Awaitable[None]]


def loop_turns(count: int) -> Pause:
    """Return a pause of so many turns of the event loop."""

    async def pause() -> None:
        for _ in range(count):
            await asyncio.sleep(0)

    return pause


IMMEDIATELY = loop_turns(0)


class FakeTrainer:
    """A ``PolicyTrainer`` that counts its steps and remembers its plans."""

    def __init__(
        self,
        *,
        queue: SampleQueue | None = None,
        pause: Pause = IMMEDIATELY,
        failing_steps: Collection[int] = (),
        skipped_steps: Collection[int] = (),
        disk: dict[str, PolicyVersion] | None = None,
    ) -> None:
        """Script the trainer.

        Args:
            queue: where payloads are fetched; None: nowhere.
            pause: of a step.
            failing_steps: steps that raise TrainerError, each once.
            skipped_steps: steps whose gradient is not finite.
            disk: checkpoints by path; give the same one to the trainer that loads them.
        """
        self._queue = queue
        self._pause = pause
        self._failing_steps = set(failing_steps)
        self._skipped_steps = frozenset(skipped_steps)
        self._disk = {} if disk is None else disk
        self._prefetched: set[StepPlan] = set()
        self.policy_version = PolicyVersion(0)
        self.trained: list[StepPlan] = []
        self.evaluated: list[StepPlan] = []

    async def prefetch(self, plan: StepPlan) -> None:
        """Fetch the payloads once, and see that none is missing."""
        if self._queue is not None:
            await self._queue.fetch(planned_samples(plan))
        self._prefetched.add(plan)

    async def train(self, plan: StepPlan) -> StepReport:
        """Make the next version."""
        assert plan in self._prefetched, f"step {plan.step} was not prefetched"
        assert plan.step == self.policy_version, f"step {plan.step} on v{self.policy_version}"
        await self._pause()
        if plan.step in self._failing_steps:
            self._failing_steps.remove(plan.step)
            raise TrainerError(f"scripted failure at step {plan.step}")
        self.policy_version = PolicyVersion(plan.step + 1)
        self.trained.append(plan)
        skipped = plan.step in self._skipped_steps
        return msgspec.structs.replace(make_report(plan), skipped=skipped)

    async def evaluate(self, plan: StepPlan) -> EvaluationReport:
        """Report a divergence that falls with each version."""
        assert plan in self._prefetched, f"evaluation at {plan.step} was not prefetched"
        self.evaluated.append(plan)
        return EvaluationReport(
            step=self.policy_version,
            num_samples=len(planned_samples(plan)),
            num_supervised=plan.num_supervised,
            reverse_kl=1.0 / (1 + self.policy_version),
            reverse_kl_on_support=1.0 / (1 + self.policy_version),
            mean_generated_tokens=plan.num_supervised / max(1, len(planned_samples(plan))),
            truncated_fraction=0.0,
        )

    async def export(self, policy_version: PolicyVersion) -> WeightManifest:
        """Name the weights, which do not exist."""
        assert policy_version == self.policy_version, f"v{policy_version} is not current"
        return WeightManifest(
            policy_version=policy_version, location="nowhere", num_bytes=0, checksum=""
        )

    async def save(self, path: str) -> None:
        """Keep the version under this path."""
        self._disk[path] = self.policy_version

    async def load(self, path: str) -> None:
        """Go back to the version kept."""
        self.policy_version = self._disk[path]


class FakePublisher:
    """A ``WeightPublisher`` that remembers the versions, each served after a pause."""

    def __init__(self, *, pause: Pause = IMMEDIATELY) -> None:
        self._pause = pause
        self.versions: list[PolicyVersion] = []

    @property
    def served_version(self) -> PolicyVersion:
        """The version that replicas sample with."""
        return self.versions[-1] if self.versions else PolicyVersion(0)

    async def publish(self, manifest: WeightManifest) -> None:
        """Serve the version from the end of the pause on."""
        await self._pause()
        self.versions.append(manifest.policy_version)


class FakeRunner:
    """A ``RolloutRunner`` whose trajectories take a turn of the loop a token."""

    def __init__(
        self,
        queue: SampleQueue,
        *,
        publisher: FakePublisher,
        evaluation_queue: SampleQueue | None = None,
        max_tokens: int = 16,
        dead_ordinals: Collection[int] = (),
    ) -> None:
        """Script the rollouts.

        Args:
            queue: takes the samples.
            publisher: tells the version sampled with.
            evaluation_queue: takes the held-out ones.
            max_tokens: reply lengths are uniform in 1 … max_tokens, by the task's seed.
            dead_ordinals: trajectories that are given up after their last token.
        """
        self._queue = queue
        self._evaluation_queue = evaluation_queue or queue
        self._publisher = publisher
        self._max_tokens = max_tokens
        self._dead_ordinals = dead_ordinals
        self._rolling: dict[str, int] = {}
        self._student = StageMeter()
        self.tasks: list[RolloutTask] = []

    async def run(self, task: RolloutTask) -> RolloutOutcome:
        """Sample, then queue or give up."""
        self.tasks.append(task)
        policy_version = self._publisher.served_version
        num_tokens = random.Random(task.seed).randint(1, self._max_tokens)
        self._rolling[task.sample_id] = num_tokens
        self._student = StageMeter(
            num_requests=self._student.num_requests + 1,
            num_prompt_tokens=self._student.num_prompt_tokens + PROMPT_TOKENS,
            num_generated_tokens=self._student.num_generated_tokens + num_tokens,
        )
        try:
            await loop_turns(num_tokens)()
            if not task.held_out and task.ordinal in self._dead_ordinals:
                return make_dead(task.ordinal, num_generated_tokens=num_tokens)
            meta = make_meta(
                task.ordinal,
                due_step=task.due_step,
                policy_version=policy_version,
                segments=[(PROMPT_TOKENS + num_tokens, num_tokens)],
            )
            meta = msgspec.structs.replace(meta, sample_id=task.sample_id)
            queue = self._evaluation_queue if task.held_out else self._queue
            await queue.put(meta, bytes(meta.num_bytes))
            return meta
        finally:
            del self._rolling[task.sample_id]

    async def report(self) -> RolloutWorkerReport:
        """Return the counters."""
        return RolloutWorkerReport(
            student=self._student,
            teacher=StageMeter(),
            num_in_flight_tokens=sum(self._rolling.values()),
            loop_lag_p99_s=0.0,
            counters={},
        )


class MemoryStore:
    """A ``RunStore`` that keeps the engine's states by step, and the dead letters."""

    def __init__(self) -> None:
        self.states: dict[int, bytes] = {}
        self.dead_letters: list[DeadSample] = []

    async def save(self, step: int, state: bytes, trainer: PolicyTrainer) -> None:
        """Save the trainer first: a state without its weights is no checkpoint."""
        await trainer.save(self.path(step))
        self.states[step] = state

    async def bury(self, dead: DeadSample) -> None:
        """Append."""
        self.dead_letters.append(dead)

    @staticmethod
    def path(step: int) -> str:
        """Return where the trainer's part of a checkpoint lies."""
        return f"memory/step-{step}"


class ListSink:
    """A ``MetricSink`` that keeps (kind, step, values)."""

    def __init__(self) -> None:
        self.records: list[tuple[str, int, dict[str, float | int | str]]] = []

    async def write(self, kind: str, step: int, values: Mapping[str, float | int | str]) -> None:
        """Append."""
        self.records.append((kind, step, dict(values)))


class ListPrompts:
    """A ``PromptSource`` of plain messages, in order, epoch after epoch."""

    def __init__(
        self,
        num_rows: int,
        *,
        num_epochs: int | None = None,
        bad_rows: Collection[int] = (),
    ) -> None:
        self._num_rows = num_rows
        self._bad_rows = bad_rows
        self.num_ordinals = None if num_epochs is None else num_epochs * num_rows

    def __len__(self) -> int:
        return self._num_rows

    def row(self, ordinal: Ordinal) -> tuple[str, dict[str, object]]:
        """Return the row of this place.

        Raises:
            PromptError: the row is one of ``bad_rows``.
        """
        index = ordinal % self._num_rows
        if index in self._bad_rows:
            raise PromptError(f"prompt-{index} is no prompt")
        return f"prompt-{index}", {"messages": [{"role": "user", "content": f"question {index}"}]}
