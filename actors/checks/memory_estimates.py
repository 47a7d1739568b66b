"""How much memory a job takes on one machine, from the sizes of its models.

The figures are upper estimates of steady state; those of process overhead were measured with
vLLM 0.32 and Megatron-Core 0.16 on CPU.
"""

import pathlib

import msgspec

from opdkit.actors.checks.preflight_report import Finding, error, good, warning
from opdkit.actors.files.model_files import ModelFiles
from opdkit.actors.hardware import count_gpus
from opdkit.protocols.config import EngineSection, JobSpec, PlacementSection

MIB = 2**20
ENGINE_OVERHEAD_BYTES = 1000 * MIB
TRAINER_OVERHEAD_BYTES = 700 * MIB
SERVICE_OVERHEAD_BYTES = 1200 * MIB
"""Ray's own processes, the coordinator and the rollout workers."""
NATIVE_BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16"}


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What the estimates are compared with."""

    total_bytes: int
    available_bytes: int
    has_bfloat16: bool
    """The CPU multiplies bfloat16 natively."""
    num_gpus: int = 0


class MemoryEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes in main memory, by part of the job; parts on GPUs count only their overhead."""

    student_bytes: int
    teacher_bytes: int
    trainer_bytes: int
    other_bytes: int

    @property
    def total_bytes(self) -> int:
        """All parts together."""
        return self.student_bytes + self.teacher_bytes + self.trainer_bytes + self.other_bytes


def check_memory(
    spec: JobSpec, student: ModelFiles, teacher: ModelFiles, machine: Machine
) -> list[Finding]:
    """Compare the job's estimate with this machine; for a cluster, only state it."""
    estimate = estimate_memory(spec, student, teacher, machine)
    facts = (
        f"about {_gib(estimate.total_bytes)}: students {_gib(estimate.student_bytes)}, "
        f"teachers {_gib(estimate.teacher_bytes)}, trainers {_gib(estimate.trainer_bytes)}, "
        f"the rest {_gib(estimate.other_bytes)}"
    )
    if spec.cluster.address is not None:
        return [good("memory", f"{facts}, over the cluster")]
    if estimate.total_bytes > machine.total_bytes:
        return [error("memory", f"{facts}, but this machine has {_gib(machine.total_bytes)}")]
    if estimate.total_bytes > machine.available_bytes:
        return [warning("memory", f"{facts}, but only {_gib(machine.available_bytes)} are free")]
    return [good("memory", f"{facts}; {_gib(machine.available_bytes)} are free")]


def estimate_memory(
    spec: JobSpec, student: ModelFiles, teacher: ModelFiles, machine: Machine
) -> MemoryEstimate:
    """Estimate each part.

    The queue holds at most its bound; a published version is one copy of the weights.
    """
    section = spec.teachers[0]
    element = _element_bytes(spec.student.dtype, machine)
    return MemoryEstimate(
        student_bytes=spec.student.replicas * _engine_bytes(spec.student, student, machine),
        teacher_bytes=section.replicas * _engine_bytes(section, teacher, machine),
        trainer_bytes=spec.trainer.parallel.world_size * trainer_rank_bytes(spec, student, machine),
        other_bytes=SERVICE_OVERHEAD_BYTES
        + spec.pipeline.queue_mib * MIB
        + element * student.num_parameters,
    )


def trainer_rank_bytes(spec: JobSpec, student: ModelFiles, machine: Machine) -> int:
    """Estimate one trainer rank: parameters, gradients, AdamW, activations, logits.

    In bfloat16 the rank keeps float32 masters and gradients (18 bytes a parameter), in float32
    16. Activations: 34 elements per token, layer and hidden unit (Korthikanti et al., 2022,
    without attention scores), or 1 with recomputation. Logits and their gradient are float32.
    """
    if _on_gpu(spec.trainer.placement):
        return TRAINER_OVERHEAD_BYTES
    size, tokens, shape = (
        spec.trainer.parallel.tensor,
        spec.trainer.microbatch_tokens,
        student.shape,
    )
    element = _element_bytes(spec.trainer.dtype, machine)
    per_parameter = 16 if element == 4 else 18
    kept = 1 if spec.trainer.recompute else 34
    activations = tokens * shape.num_layers * shape.hidden_size * kept * element // 2
    logits = 3 * tokens * shape.logit_width * 4
    return (
        TRAINER_OVERHEAD_BYTES
        + (student.num_parameters * per_parameter + activations + logits) // size
    )


def read_machine() -> Machine:
    """Read this machine's memory, the smaller of its own and its control group's, and its units."""
    fields = dict(
        line.split(":", 1) for line in pathlib.Path("/proc/meminfo").read_text().splitlines()
    )
    total, available = (
        int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable")
    )
    limit = pathlib.Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()).isdecimal():
        used = int(limit.with_name("memory.current").read_text())
        total, available = min(total, int(text)), min(available, max(int(text) - used, 0))
    flags = set(pathlib.Path("/proc/cpuinfo").read_text().split())
    return Machine(
        total_bytes=total,
        available_bytes=available,
        has_bfloat16=bool(flags & NATIVE_BFLOAT16_FLAGS),
        num_gpus=count_gpus(),
    )


def _engine_bytes(section: EngineSection, model: ModelFiles, machine: Machine) -> int:
    if _on_gpu(section.placement):
        return ENGINE_OVERHEAD_BYTES
    weights = _element_bytes(section.dtype, machine) * model.num_parameters
    return ENGINE_OVERHEAD_BYTES + weights + section.kv_cache_mib * MIB


def _element_bytes(dtype: str, machine: Machine) -> int:
    is_half = dtype == "bfloat16" or (dtype == "auto" and machine.has_bfloat16)
    return 2 if is_half else 4


def _on_gpu(placement: PlacementSection) -> bool:
    return placement.num_gpus > 0


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
