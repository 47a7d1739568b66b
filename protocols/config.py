"""The configuration tree: one frozen Struct a section, defaults, bounds, derived numbers.

``decode`` (config_decoding.py) builds it from plain values. Bounds of one field stand in its type;
checks across fields stand in ``JobSpec.__post_init__`` and name both. What needs the models or the
machine is checked by the preflight, not here.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta

from opdkit.protocols.config_fields import (
    Count,
    Fraction,
    Name,
    NonNegativeFloat,
    Path,
    PositiveFloat,
    PositiveInt,
    Section,
    Seed,
)
from opdkit.protocols.config_simulation import SimulationSection
from opdkit.protocols.errors import ConfigError


class JobSection(Section, frozen=True, kw_only=True):
    """What the run is called and where it writes."""

    name: Name
    """Of the run, in logs and as its folder's name."""
    run_dir: str = ""
    """Folder of checkpoints, metrics, export and plot; empty: ``runs/<name>``."""
    seed: Seed = 0
    """Of data order and sampling."""

    @property
    def directory(self) -> str:
        """The folder that the run writes into."""
        return self.run_dir or f"runs/{self.name}"


class PlacementSection(Section, frozen=True, kw_only=True):
    """What one process of this kind reserves from Ray."""

    num_cpus: NonNegativeFloat = 0.5
    """May be a fraction: Ray counts it, and limits nothing."""
    num_gpus: NonNegativeFloat = 0.0
    """0: the process computes on the CPU."""
    num_threads: PositiveInt = 1
    """Threads of arithmetic in the process. More than its cores makes everything slower."""


class RolloutPlacementSection(PlacementSection, frozen=True, kw_only=True):
    """What one rollout worker reserves from Ray: it waits, most of the time."""

    num_cpus: NonNegativeFloat = 0.1


class EngineSection(Section, frozen=True, kw_only=True):
    """A vLLM engine: the student's, or a teacher's."""

    model: Path
    """Folder in Hugging Face format: config.json, safetensors, tokenizer."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """``auto``: bfloat16 where the hardware multiplies it natively, else float32."""
    replicas: PositiveInt = 1
    """Engines with the same weights, each in a process of its own."""
    max_model_len: PositiveInt = 1024
    """Longest sequence, prompt and reply, in tokens."""
    max_num_seqs: PositiveInt = 32
    """Sequences decoded or scored at once by one replica."""
    max_batch_tokens: PositiveInt = 2048
    """Tokens that the engine processes in one step."""
    kv_cache_mib: PositiveInt = 256
    """Memory of one replica for the keys and values of running sequences."""
    enforce_eager: bool = True
    """False: compile the model at start, which takes longer and decodes faster."""
    placement: PlacementSection = PlacementSection()


class StudentSection(EngineSection, frozen=True, kw_only=True):
    """The model that is trained and that samples."""


class TeacherSection(EngineSection, frozen=True, kw_only=True):
    """A model that scores."""

    name: Name = "teacher"
    """Of the teacher, in metrics."""


class DataSection(Section, frozen=True, kw_only=True):
    """Prompts: JSONL files, one object a line, with ``messages`` in the chat format."""

    train: Path
    """Prompts to train on."""
    held_out: str | None = None
    """Prompts for the evaluation; null: no evaluation."""
    shuffle: bool = True
    """Another order each epoch, decided by ``job.seed``; false: the file's order."""
    num_epochs: PositiveInt | None = None
    """Passes over the data; null: as many as the steps need."""
    samples_per_prompt: PositiveInt = 1
    """Independent trajectories of each prompt drawn."""
    bad_rows: Literal["error", "dead_letter"] = "error"
    """What a row that is no usable prompt costs: the job, at its check, or only that sample."""


class RolloutSection(Section, frozen=True, kw_only=True):
    """How trajectories are made."""

    max_new_tokens: PositiveInt = 128
    """Longest reply of one turn."""
    temperature: PositiveFloat = 1.0
    """Of sampling."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Sample from the likeliest tokens of this mass; 1: from all."""
    top_k: int = -1
    """Sample from so many of the likeliest tokens; -1: from all."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end a reply, besides the model's own end-of-sequence ids."""
    scheduler: str = "single_turn"
    """Name in the registry."""
    scheduler_options: dict[str, Any] = {}  # noqa: RUF012 - msgspec copies it
    """Passed to the scheduler as they are."""
    max_turns: PositiveInt = 1
    """Replies of one trajectory; the scheduler may stop earlier."""
    hook_timeout_s: PositiveFloat = 60.0
    """Longest time for one hook of the scheduler, or one tool call."""
    on_hook_timeout: Literal["error_observation", "drop", "fail_job"] = "drop"
    """Tell the model and go on, drop the trajectory, or end the job."""
    max_attempts: PositiveInt = 3
    """Tries of one trajectory before it is a dead letter."""
    workers: PositiveInt = 1
    """Processes that run trajectories, hundreds each."""
    placement: RolloutPlacementSection = RolloutPlacementSection()


class LossSection(Section, frozen=True, kw_only=True):
    """The divergence between teacher P and student Q. Definitions: docs/losses.md."""

    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = "reverse_kl"
    """KL(P‖Q), KL(Q‖P), or their generalized Jensen-Shannon mixture."""
    beta: Fraction | None = None
    """Mixture weight of ``jsd``; 0 and 1 mean the forward and the reverse KL."""
    support: Literal["top_k", "full"] = "top_k"
    """Tokens compared at a position: the teacher's likeliest, or all."""
    top_k: PositiveInt = 64
    """Number of tokens with support ``top_k``."""
    tail: Literal["bucket", "renormalize"] = "bucket"
    """The mass outside the top k: one more outcome, or scaled away."""
    temperature: PositiveFloat = 1.0
    """Divides both models' logits in the loss."""
    normalize: Literal["token", "sequence"] = "token"
    """Mean over the batch's tokens, or over its sequences' means."""


class OptimizerSection(Section, frozen=True, kw_only=True):
    """AdamW and its schedule."""

    lr: PositiveFloat = 1e-4
    """Peak learning rate."""
    min_lr: NonNegativeFloat = 0.0
    """Where the schedule ends."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """How the rate falls from ``lr`` to ``min_lr`` after the warm-up."""
    warmup_steps: Count = 0
    """Steps in which the rate rises from 0."""
    weight_decay: NonNegativeFloat = 0.0
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    eps: PositiveFloat = 1e-8
    clip_grad: PositiveFloat = 1.0
    """Largest norm of the gradient; a longer one is scaled down to it."""


class ParallelSection(Section, frozen=True, kw_only=True):
    """Sizes of the trainer's process grid."""

    data: PositiveInt = 1
    """Copies of the model, each with a part of the batch."""
    tensor: PositiveInt = 1
    """Ranks that share one copy of the model."""
    sequence: bool = False
    """Sequence parallelism within the tensor-parallel group."""

    @property
    def world_size(self) -> int:
        """Number of trainer ranks."""
        return self.data * self.tensor


class TrainerSection(Section, frozen=True, kw_only=True):
    """The Megatron-Core trainer."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of weights and activations, as for the engines; masters stay float32."""
    parallel: ParallelSection = ParallelSection()
    optimizer: OptimizerSection = OptimizerSection()
    microbatch_tokens: PositiveInt = 2048
    """Most tokens packed into one micro-batch of one rank."""
    recompute: bool = False
    """Recompute activations in the backward pass."""
    placement: PlacementSection = PlacementSection()


class PipelineSection(Section, frozen=True, kw_only=True):
    """How far the stages may run apart."""

    num_steps: PositiveInt
    """Optimizer steps of the whole run."""
    samples_per_step: PositiveInt = 16
    """Trajectories in the global batch of one step."""
    max_policy_lag: Count = 1
    """Most optimizer steps from a sample's first token to its training; 0: strictly on-policy."""
    queue_samples: PositiveInt | None = None
    """Bound of the queue in samples; null: the number of slots."""
    queue_mib: PositiveInt = 256
    """Bound of the queue in MiB of payload."""

    @property
    def slots(self) -> int:
        """Samples alive at once.

        With a slot held from draw to publication, at most ``slots`` samples precede the next
        draw, and each step retires ``samples_per_step``: the lag is at most max_policy_lag.
        """
        return (self.max_policy_lag + 1) * self.samples_per_step


class CheckpointSection(Section, frozen=True, kw_only=True):
    """When the run can be resumed from."""

    every_steps: PositiveInt = 10
    """Steps between two checkpoints; one more is written at the end."""
    keep: PositiveInt = 2
    """Newest checkpoints that stay on disk."""


class EvaluationSection(Section, frozen=True, kw_only=True):
    """Divergence on the held-out prompts, before the first and after the last step."""

    every_steps: PositiveInt | None = None
    """Also after every so many steps."""
    max_prompts: PositiveInt = 64
    """The first so many prompts of ``data.held_out``."""


class LoggingSection(Section, frozen=True, kw_only=True):
    """Where the metrics go, besides ``metrics.jsonl``."""

    tensorboard: bool = True
    """Also write TensorBoard event files."""


class DeadlineSection(Section, frozen=True, kw_only=True):
    """Longest time, in seconds, that a remote call may take before the job does without it."""

    startup_s: PositiveFloat = 600.0
    """From a process's start to its being ready."""
    generate_s: PositiveFloat = 600.0
    """One turn of one trajectory."""
    score_s: PositiveFloat = 300.0
    """The teacher's scores of one sequence."""
    step_s: PositiveFloat = 3600.0
    """One optimizer step."""
    publish_s: PositiveFloat = 300.0
    """New weights to all student replicas."""
    checkpoint_s: PositiveFloat = 1800.0
    """Writing or reading one checkpoint."""
    control_s: PositiveFloat = 60.0
    """A call that only moves bookkeeping."""


class ClusterSection(Section, frozen=True, kw_only=True):
    """The Ray cluster."""

    address: str | None = None
    """Null: a private one on this machine, gone with the run. ``auto``: the one that runs here."""


class JobSpec(Section, frozen=True, kw_only=True):
    """One distillation job."""

    job: JobSection
    student: StudentSection
    teachers: Annotated[tuple[TeacherSection, ...], Meta(min_length=1)]
    data: DataSection
    rollout: RolloutSection = RolloutSection()
    loss: LossSection = LossSection()
    trainer: TrainerSection = TrainerSection()
    pipeline: PipelineSection
    checkpoint: CheckpointSection = CheckpointSection()
    evaluation: EvaluationSection = EvaluationSection()
    logging: LoggingSection = LoggingSection()
    deadlines: DeadlineSection = DeadlineSection()
    cluster: ClusterSection = ClusterSection()
    simulation: SimulationSection = SimulationSection()

    def __post_init__(self) -> None:
        """Check what one field alone cannot show.

        Raises:
            ConfigError: naming both fields, their values and the bound.
        """
        for check in CROSS_CHECKS:
            check(self)


def _lengths_fit(spec: JobSpec) -> None:
    longest = spec.student.max_model_len
    if spec.rollout.max_new_tokens >= longest:
        raise ConfigError(
            f"rollout.max_new_tokens is {spec.rollout.max_new_tokens}, but must be less than "
            f"student.max_model_len, {longest}: a prompt needs room too"
        )
    for index, teacher in enumerate(spec.teachers):
        # Scoring makes vLLM sample one token more.
        if teacher.max_model_len <= longest:
            raise ConfigError(
                f"teachers[{index}].max_model_len is {teacher.max_model_len}, but must be more "
                f"than student.max_model_len, {longest}: scoring needs one token of room"
            )
    if spec.trainer.microbatch_tokens < longest:
        raise ConfigError(
            f"trainer.microbatch_tokens is {spec.trainer.microbatch_tokens}, but must be at least "
            f"student.max_model_len, {longest}: a sequence is not split"
        )


def _one_teacher(spec: JobSpec) -> None:
    if len(spec.teachers) > 1:
        raise ConfigError(
            f"teachers has {len(spec.teachers)} entries, but one is supported: name the one to use"
        )


def _loss_is_defined(spec: JobSpec) -> None:
    loss = spec.loss
    if (loss.divergence == "jsd") != (loss.beta is not None):
        raise ConfigError(
            f"loss.beta is {loss.beta} with loss.divergence {loss.divergence!r}: "
            "give beta, between 0 and 1, with 'jsd' and only with it"
        )
    if loss.support == "top_k" and loss.tail == "renormalize" and loss.top_k == 1:
        raise ConfigError(
            "loss.top_k is 1 with loss.tail 'renormalize': that loss is identically 0; "
            "use a larger top_k, or tail 'bucket'"
        )
    if loss.support == "top_k" and loss.tail == "bucket" and loss.temperature != 1.0:
        raise ConfigError(
            f"loss.temperature is {loss.temperature} with loss.tail 'bucket': the tail of a "
            "teacher's top k is known at 1 only; use support 'full' or tail 'renormalize'"
        )


def _sampling_is_on_policy(spec: JobSpec) -> None:
    if spec.rollout.top_k == 0 or spec.rollout.top_k < -1:
        raise ConfigError(f"rollout.top_k is {spec.rollout.top_k}, but must be -1 or at least 1")


def _queue_holds_a_batch(spec: JobSpec) -> None:
    pipeline = spec.pipeline
    if pipeline.queue_samples is not None and pipeline.queue_samples < pipeline.samples_per_step:
        raise ConfigError(
            f"pipeline.queue_samples is {pipeline.queue_samples}, but must be at least "
            f"pipeline.samples_per_step, {pipeline.samples_per_step}: a step needs its batch"
        )


def _schedule_descends(spec: JobSpec) -> None:
    optimizer = spec.trainer.optimizer
    if optimizer.min_lr > optimizer.lr:
        raise ConfigError(
            f"trainer.optimizer.min_lr is {optimizer.min_lr}, but must not exceed "
            f"trainer.optimizer.lr, {optimizer.lr}"
        )


def _sequence_parallel_has_a_group(spec: JobSpec) -> None:
    parallel = spec.trainer.parallel
    if parallel.sequence and parallel.tensor == 1:
        raise ConfigError(
            "trainer.parallel.sequence is true, but trainer.parallel.tensor is 1: "
            "sequence parallelism works within a tensor-parallel group"
        )


CROSS_CHECKS = (
    _lengths_fit,
    _one_teacher,
    _loss_is_defined,
    _sampling_is_on_policy,
    _queue_holds_a_batch,
    _schedule_descends,
    _sequence_parallel_has_a_group,
)
