"""Values that cross an actor boundary: no I/O, no tensors.

Per-token fields are ``bytes`` in little-endian order of the stated dtype, so that they are
decoded without a copy (``numpy.frombuffer``, ``memoryview.cast``) and travel as one block.
"""

from typing import Any

import msgspec

from opdkit.protocols.ids import Ordinal, PolicyVersion

INT32_BYTES = 4
FLOAT32_BYTES = 4


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the messages: immutable, strict on decode."""


def _check_length(owner: str, field: str, data: bytes, num_items: int, item_bytes: int) -> None:
    if len(data) != num_items * item_bytes:
        raise ValueError(
            f"{owner}.{field}: {len(data)} bytes, expected {num_items} items of {item_bytes} bytes"
        )


class VersionSpan(Message, frozen=True, kw_only=True, gc=False):
    """A run of consecutive sampled tokens that came from one set of weights."""

    policy_version: PolicyVersion
    num_tokens: int


class GenerateRequest(Message, frozen=True, kw_only=True):
    """Ask a student replica to continue a sequence of ids."""

    request_id: str
    session_id: str
    """Same for all turns of a trajectory: they go to the replica that holds its prefix cache."""
    token_ids: bytes
    """[T] int32, the whole history."""
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    """-1: no limit."""
    seed: int | None
    stop_token_ids: tuple[int, ...] = ()
    """Besides the model's own end-of-sequence ids."""


class TokenChunk(Message, frozen=True, kw_only=True):
    """Some more tokens of a reply, as the engine made them. Their ``N`` is in ``spans``."""

    token_ids: bytes
    """[N] int32."""
    logprobs: bytes
    """[N] float32, natural log, of the distribution sampled from."""
    spans: tuple[VersionSpan, ...]
    """Versions of these N tokens, in order; the counts add up to N. From the engine."""
    finish_reason: str | None = None
    """None until the last chunk: then ``stop``, ``length`` or ``abort``."""

    @property
    def num_tokens(self) -> int:
        """Number N of tokens."""
        return len(self.token_ids) // INT32_BYTES

    def __post_init__(self) -> None:
        """Reject ragged chunks."""
        num_tokens = sum(span.num_tokens for span in self.spans)
        _check_length("TokenChunk", "token_ids", self.token_ids, num_tokens, INT32_BYTES)
        _check_length("TokenChunk", "logprobs", self.logprobs, num_tokens, FLOAT32_BYTES)


class ScoreRequest(Message, frozen=True, kw_only=True):
    """Ask a teacher for its distribution at the supervised positions of one sequence."""

    sample_id: str
    token_ids: bytes
    """[T] int32."""
    positions: bytes
    """[P] int32, increasing, each in [1, T): indices of the tokens to be predicted.

    The distribution at position j is the teacher's after tokens 0 … j-1.
    """


class TeacherScores(Message, frozen=True, kw_only=True):
    """The teacher's distribution at P positions, over K of its tokens each."""

    num_positions: int
    """P"""
    support_size: int
    """K: the top k, or the whole vocabulary (then ``token_ids`` is empty: column i is id i)."""
    token_ids: bytes
    """[P, K] int32, or empty."""
    logprobs: bytes
    """[P, K] float32, natural log; -inf where the teacher gave fewer than K."""
    sampled_logprobs: bytes
    """[P] float32, of the token that stands at the position."""
    tail_mass: bytes
    """[P] float32, probability of everything outside the K tokens, in [0, 1]."""

    def __post_init__(self) -> None:
        """Reject ragged scores."""
        num_cells = self.num_positions * self.support_size
        if self.token_ids:
            _check_length("TeacherScores", "token_ids", self.token_ids, num_cells, INT32_BYTES)
        _check_length("TeacherScores", "logprobs", self.logprobs, num_cells, FLOAT32_BYTES)
        for field in ("sampled_logprobs", "tail_mass"):
            data = getattr(self, field)
            _check_length("TeacherScores", field, data, self.num_positions, FLOAT32_BYTES)


class Segment(Message, frozen=True, kw_only=True):
    """One training sequence: recorded ids, in which the student's own tokens are marked.

    Usually one a trajectory; a history that was rewritten between turns starts another.
    """

    token_ids: bytes
    """[T] int32, prompt, replies and insertions, as sent and as sampled."""
    loss_mask: bytes
    """[T] uint8, 1 where the student sampled the token."""
    sampler_logprobs: bytes
    """[T] float32, 0.0 where ``loss_mask`` is 0; empty if the scheduler gave inconsistent ones."""
    spans: tuple[VersionSpan, ...]
    """Versions of the tokens with mask 1, in order."""

    @property
    def num_tokens(self) -> int:
        """Length T."""
        return len(self.loss_mask)

    @property
    def num_supervised(self) -> int:
        """Number P of tokens with mask 1."""
        return self.loss_mask.count(1)

    def __post_init__(self) -> None:
        """Reject ragged segments, and versions that do not cover the sampled tokens."""
        num_tokens = len(self.loss_mask)
        _check_length("Segment", "token_ids", self.token_ids, num_tokens, INT32_BYTES)
        if self.sampler_logprobs:
            logprobs = self.sampler_logprobs
            _check_length("Segment", "sampler_logprobs", logprobs, num_tokens, FLOAT32_BYTES)
        num_versioned = sum(span.num_tokens for span in self.spans)
        if num_versioned != self.num_supervised:
            raise ValueError(
                f"Segment.spans cover {num_versioned} tokens, loss_mask marks {self.num_supervised}"
            )
        if num_tokens and self.loss_mask[0]:
            raise ValueError("Segment.loss_mask[0] is 1, but nothing predicts the first token")


class ScoredSegment(Message, frozen=True, kw_only=True):
    """A segment with the teacher's scores at its supervised positions, in order."""

    segment: Segment
    scores: TeacherScores

    def __post_init__(self) -> None:
        """Reject scores of another number of positions."""
        if self.scores.num_positions != self.segment.num_supervised:
            raise ValueError(
                f"scores cover {self.scores.num_positions} positions, "
                f"loss_mask marks {self.segment.num_supervised}"
            )


class Sample(Message, frozen=True, kw_only=True):
    """What one trajectory yields for training: the payload of a queue item."""

    sample_id: str
    segments: tuple[ScoredSegment, ...]


class SegmentShape(Message, frozen=True, kw_only=True, gc=False):
    """What packing needs to know of a segment."""

    num_tokens: int
    num_supervised: int


class SampleMeta(Message, frozen=True, kw_only=True, tag=True):
    """All that the coordinator sees of a sample."""

    sample_id: str
    ordinal: Ordinal
    due_step: int
    """The last step that may train it: its draw's policy version plus max_policy_lag."""
    segments: tuple[SegmentShape, ...]
    oldest_version: PolicyVersion
    """Least policy version among its tokens."""
    num_generated_tokens: int
    """Tokens that the student sampled for it in its final attempt (with mask 1 or not)."""
    num_wasted_tokens: int
    """Tokens sampled in failed attempts before."""
    num_bytes: int
    """Size of the payload."""
    num_turns: int
    finish_reason: str
    generate_s: float
    """Time spent waiting for the student, over all turns."""
    score_s: float
    """Time spent waiting for the teacher."""
    missing_logprobs: bool = False
    """The scheduler's log-probabilities did not match the sampled tokens and were dropped."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all segments, prompts included."""
        return sum(shape.num_tokens for shape in self.segments)

    @property
    def num_supervised(self) -> int:
        """Supervised tokens of all segments."""
        return sum(shape.num_supervised for shape in self.segments)


class RolloutTask(Message, frozen=True, kw_only=True):
    """One trajectory to make, score and queue."""

    sample_id: str
    ordinal: Ordinal
    due_step: int
    prompt_id: str
    """Names the dataset row (file and line)."""
    row: dict[str, Any]
    """All columns of the row; ``messages`` is the prompt."""
    seed: int
    """Of this trajectory: sampling is repeatable given the same weights and batch."""
    held_out: bool = False
    """Goes to the evaluation channel of the queue and is trained on by nobody."""


class DeadSample(Message, frozen=True, kw_only=True, tag=True):
    """A trajectory that ended without a sample: a line of the dead letters."""

    sample_id: str
    ordinal: Ordinal
    prompt_id: str
    reason: str
    """Class name of the last error."""
    message: str
    traceback: str
    num_attempts: int
    num_generated_tokens: int
    """Tokens that the student sampled for it, all lost."""


RolloutOutcome = SampleMeta | DeadSample


class Demand(Message, frozen=True, kw_only=True):
    """What the next batch must hold."""

    count: int
    """Samples in the batch; 0: nothing is wanted now."""
    quotas: tuple[tuple[int, int], ...] = ()
    """(due step, least number of samples due by it), increasing in both."""


class SegmentRef(Message, frozen=True, kw_only=True, gc=False):
    """A segment within a leased sample."""

    sample_id: str
    index: int
    num_tokens: int
    num_supervised: int


class StepPlan(Message, frozen=True, kw_only=True):
    """Who trains on what in one optimizer step."""

    step: int
    """The policy version trained from; the step makes version ``step + 1``."""
    microbatches: tuple[tuple[tuple[SegmentRef, ...], ...], ...]
    """[data-parallel rank][micro-batch][segment]; every rank has as many micro-batches."""
    num_supervised: int
    """Supervised tokens of the whole global batch: the loss's denominator."""
    num_sequences: int
    """Segments with a supervised token in the whole global batch."""


class StepReport(Message, frozen=True, kw_only=True):
    """What one optimizer step did. Sums are over the whole global batch."""

    step: int
    loss: float
    """As normalised by ``loss.normalize``, in nats."""
    grad_norm: float
    learning_rate: float
    num_tokens: int
    num_supervised: int
    """Supervised positions as the ranks counted them, uncovered ones included."""
    num_uncovered: int
    """Positions left out because the teacher gave no finite log-probability."""
    reverse_kl_estimate: float
    """Mean over positions of log Q_train(y) - log P(y): unbiased for KL(Q‖P) on-policy."""
    sampler_gap: float
    """Mean over positions of |log Q_train(y) - log Q_sampler(y)|, nats."""
    student_mass: float
    """Mean student probability on the teacher's support."""
    num_microbatches: int
    step_s: float
    fetch_s: float
    """Time the slowest rank waited for its payloads after the step was due to begin."""
    skipped: bool = False
    """The loss or gradient was not finite: weights, optimizer and schedule are as before."""


class EvaluationReport(Message, frozen=True, kw_only=True):
    """Divergence on held-out prompts, on the student's own samples."""

    step: int
    """Policy version evaluated."""
    num_samples: int
    num_supervised: int
    reverse_kl: float
    """Per token, nats: mean of log Q(y) - log P(y), unbiased for KL(Q‖P) of the full vocabulary."""
    reverse_kl_on_support: float
    """Per token, nats, over the teacher's support with a tail bucket: a lower bound."""
    mean_generated_tokens: float
    truncated_fraction: float
    """Share of samples cut by the token limit."""


class WeightManifest(Message, frozen=True, kw_only=True):
    """Where the weights of one version lie, and how to recognise them."""

    policy_version: PolicyVersion
    location: str
    """Path of a safetensors file with Hugging Face names, in shared memory of the node."""
    num_bytes: int
    checksum: str
    """``checksum_of`` all tensors: name, and sum of 64-bit words modulo 2**64."""


class StageMeter(Message, frozen=True, kw_only=True):
    """What a stage has done since its start; differences give rates."""

    busy_s: float = 0.0
    """Time with at least one request in flight."""
    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0


class RolloutWorkerReport(Message, frozen=True, kw_only=True):
    """Counters of one rollout worker since its start."""

    student: StageMeter
    teacher: StageMeter
    num_in_flight_tokens: int
    """Tokens sampled so far by trajectories that have not ended."""
    loop_lag_p99_s: float
    counters: dict[str, int]
    """Named events: retries, missing_logprobs, hook_timeouts, …"""


class ProgressRecord(Message, frozen=True, kw_only=True):
    """What a person watching the run wants to know now. None: not known yet."""

    phase: str
    """``starting``, ``training``, ``evaluating``, ``exporting``, ``done``, …"""
    step: int
    """Optimizer steps done."""
    num_steps: int
    loss: float | None = None
    lag: float | None = None
    """Mean age of the last batch's samples, in policy versions."""
    queue_samples: int = 0
    queue_bound: int | None = None
    tokens_per_s: dict[str, float] = {}
    """By stage: ``student``, ``teacher``, ``trainer``; over the last step."""
    busy: dict[str, float] = {}
    """By stage: share of the last step's time with work in hand, in [0, 1]."""
    eta_s: float | None = None
    """Estimated seconds to the end of the run."""
    message: str = ""
