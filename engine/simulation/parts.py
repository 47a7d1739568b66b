"""The parts of a run, simulated: they take as long as the job says, and make nothing."""

import asyncio
import math
import random
from array import array
from collections.abc import AsyncGenerator, Mapping, Sequence

from opdkit.engine.simulation.decoder import SharedDecoder
from opdkit.protocols.config import JobSpec
from opdkit.protocols.config_simulation import SimulationSection
from opdkit.protocols.ids import PolicyVersion
from opdkit.protocols.messages import (
    EvaluationReport,
    GenerateRequest,
    ScoreRequest,
    StepPlan,
    StepReport,
    TeacherScores,
    TokenChunk,
    WeightManifest,
)
from opdkit.protocols.roles import SampleQueue

LOGPROB = -1.0
"""Of every simulated token, to student and teacher."""


def reply_tokens(simulation: SimulationSection, *, seed: int, max_tokens: int) -> int:
    """Draw the length of a reply: lognormal, at least 1, cut at ``max_tokens``."""
    draw = random.Random(seed).gauss(0.0, simulation.reply_tokens_sigma)
    length = simulation.reply_tokens_median * math.exp(draw)
    return max(1, min(round(length), max_tokens))


class SimulatedTemplate:
    """A ``ChatTemplate`` under which every prompt has the same number of tokens."""

    def __init__(self, *, prompt_tokens: int) -> None:
        self._prompt_tokens = prompt_tokens

    def render(
        self, messages: Sequence[Mapping[str, object]], *, tools: Sequence[object] = ()
    ) -> list[int]:
        """Return as many ids for each message."""
        return [0] * (self._prompt_tokens * len(messages))

    def encode(self, text: str) -> list[int]:
        """Return as many ids as for a message."""
        return [0] * self._prompt_tokens

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return no text."""
        return ""


class SimulatedStudent:
    """A ``StudentSampler`` and the ``WeightPublisher`` of its replicas, updated in place."""

    def __init__(self, spec: JobSpec) -> None:
        self._simulation = spec.simulation
        self._replicas = [
            SharedDecoder(
                step_s=spec.simulation.decode_step_s,
                sequence_s=spec.simulation.decode_sequence_s,
                max_active=spec.student.max_num_seqs,
            )
            for _ in range(spec.student.replicas)
        ]

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk]:
        """Give the whole reply at its end, from the replica with the fewest requests."""
        num_tokens = reply_tokens(
            self._simulation, seed=request.seed or 0, max_tokens=request.max_tokens
        )
        replica = min(self._replicas, key=lambda one: one.num_requests)
        spans = await replica.decode(num_tokens)
        yield TokenChunk(
            token_ids=bytes(4 * num_tokens),
            logprobs=array("f", [LOGPROB] * num_tokens).tobytes(),
            spans=spans,
            finish_reason="length" if num_tokens == request.max_tokens else "stop",
        )

    async def publish(self, manifest: WeightManifest) -> None:
        """Have every replica stand still for a while, all at once."""
        async with asyncio.TaskGroup() as updates:
            for replica in self._replicas:
                updates.create_task(
                    replica.stand_still(self._simulation.update_s, manifest.policy_version)
                )


class SimulatedTeacher:
    """A ``TeacherScorer``: each replica scores one sequence after the other."""

    def __init__(self, spec: JobSpec) -> None:
        self._simulation = spec.simulation
        self._free = asyncio.Semaphore(spec.teachers[0].replicas)

    async def score(self, request: ScoreRequest) -> TeacherScores:
        """Answer with the sampled tokens alone."""
        positions = len(request.positions) // 4
        async with self._free:
            await asyncio.sleep(score_s(self._simulation, num_tokens=len(request.token_ids) // 4))
        logprobs = array("f", [LOGPROB] * positions).tobytes()
        return TeacherScores(
            num_positions=positions,
            support_size=1,
            token_ids=bytes(4 * positions),
            logprobs=logprobs,
            sampled_logprobs=logprobs,
            tail_mass=bytes(4 * positions),
        )


class SimulatedTrainer:
    """A ``PolicyTrainer``; a step takes as long as the rank with the most tokens."""

    def __init__(self, spec: JobSpec, *, queue: SampleQueue) -> None:
        self._simulation = spec.simulation
        self._queue = queue

    async def prefetch(self, plan: StepPlan) -> None:
        """Fetch the payloads."""
        refs = (ref for rank in plan.microbatches for batch in rank for ref in batch)
        await self._queue.fetch(list(dict.fromkeys(ref.sample_id for ref in refs)))

    async def train(self, plan: StepPlan) -> StepReport:
        """Wait, and report a loss of 0."""
        rank_tokens = [
            sum(ref.num_tokens for batch in rank for ref in batch) for rank in plan.microbatches
        ]
        step_s = train_s(self._simulation, rank_tokens=max(rank_tokens))
        await asyncio.sleep(step_s)
        return StepReport(
            step=plan.step,
            loss=0.0,
            grad_norm=0.0,
            learning_rate=0.0,
            num_tokens=sum(rank_tokens),
            num_supervised=plan.num_supervised,
            num_uncovered=0,
            reverse_kl_estimate=0.0,
            sampler_gap=0.0,
            student_mass=1.0,
            num_microbatches=len(plan.microbatches[0]),
            step_s=step_s,
            fetch_s=0.0,
        )

    async def evaluate(self, plan: StepPlan) -> EvaluationReport:
        """Refuse: a simulation has no divergence."""
        raise NotImplementedError("a simulated job has no held-out prompts")

    async def export(self, policy_version: PolicyVersion) -> WeightManifest:
        """Wait, and name weights that do not exist."""
        await asyncio.sleep(self._simulation.export_s)
        return WeightManifest(
            policy_version=policy_version, location="nowhere", num_bytes=0, checksum=""
        )

    async def save(self, path: str) -> None:
        """Write nothing, in no time."""

    async def load(self, path: str) -> None:
        """Refuse: a simulation is not resumed."""
        raise NotImplementedError("a simulation begins anew")


def score_s(simulation: SimulationSection, *, num_tokens: float) -> float:
    """Return how long a teacher replica takes over a sequence."""
    return simulation.score_request_s + simulation.score_token_s * num_tokens


def train_s(simulation: SimulationSection, *, rank_tokens: float) -> float:
    """Return how long a step takes, by the tokens of the busiest data-parallel rank."""
    return simulation.train_step_s + simulation.train_token_s * rank_tokens
