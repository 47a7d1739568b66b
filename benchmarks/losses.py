# pyright: basic
"""What does the loss cost, against one read of the logits?

Forward and backward pass of ``position_losses``, in CPU time of one thread, for the vocabularies
of SmolLM2 and Qwen3, over the teacher's 64 likeliest tokens with a tail bucket and over the whole
vocabulary. Beside it, in the same run, the divergence as one would write it down: ``log_softmax``,
the formula, and autograd.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import thread_time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opdkit.benchmarks.report import (
    BenchmarkReport,
    Bound,
    Figure,
    Limit,
    check,
    figures_of,
    make_report,
    this_machine,
)
from opdkit.benchmarks.storage_meter import StorageMeter
from opdkit.engine.losses import position_losses
from opdkit.engine.losses.vocabulary import CHUNK_CELLS
from opdkit.protocols.config import LossSection
from opdkit.protocols.messages import FLOAT32_BYTES

VOCABULARIES = (49_152, 151_936)
QUICK_VOCABULARIES = (512, 1024)
NUM_POSITIONS = 512
QUICK_NUM_POSITIONS = 32
TOP_K = 64
NUM_RUNS = 5
SEED = 0

MAX_LOSS_DIFFERENCE = 1e-3
"""Nats, between ours and the plain way; more, and they compute different things."""
MAX_WORKSPACE_BYTES = 8 * CHUNK_CELLS * FLOAT32_BYTES
"""Beside one gradient there are the few chunks of logits that are worked on, however many
positions there are."""

READ = "positions over the time of one sum of all logits, measured in the same run"
GRADIENT = "one gradient of the size of the logits"


class Case(NamedTuple):
    """Student's logits and teacher's log-probabilities at P positions."""

    logits_PV: Tensor
    teacher_ids_PK: Tensor | None
    """None: over the whole vocabulary."""
    teacher_logprobs_PK: Tensor


def measure(*, num_runs: int | None, is_quick: bool) -> BenchmarkReport:
    """Measure every vocabulary with both supports."""
    machine = this_machine()
    vocabularies = QUICK_VOCABULARIES if is_quick else VOCABULARIES
    num_positions = QUICK_NUM_POSITIONS if is_quick else NUM_POSITIONS
    num_runs = num_runs or NUM_RUNS
    figures: dict[str, Figure] = {}
    limits: dict[str, Limit] = {}
    bounds: list[Bound] = []
    with one_thread():
        for num_vocab in vocabularies:
            for support in ("top_k", "full"):
                name = f"V{num_vocab}_{support}"
                case = random_case(support, num_positions=num_positions, num_vocab=num_vocab)
                _run(case, name)  # allocates and looks up what later runs find ready
                figures |= figures_of([_run(case, name) for _ in range(num_runs)])
                read_s = figures[f"{name}.read_s"].median
                limits[f"{name}.tokens_per_s"] = Limit(value=num_positions / read_s, basis=READ)
                limits[f"{name}.peak_bytes"] = Limit(
                    value=num_positions * num_vocab * FLOAT32_BYTES, basis=GRADIENT
                )
                bounds += [
                    check(figures, f"{name}.loss_difference", "<=", MAX_LOSS_DIFFERENCE),
                    check(figures, f"{name}.workspace_bytes", "<=", MAX_WORKSPACE_BYTES),
                ]
    return make_report(
        "losses",
        machine=machine,
        config={
            "divergence": "reverse_kl",
            "vocabularies": vocabularies,
            "num_positions": num_positions,
            "top_k": TOP_K,
            "dtype": "float32",
            "num_threads": 1,
            "num_runs": num_runs,
            "seed": SEED,
            "torch": str(torch.__version__),
        },
        figures=figures,
        limits=limits,
        bounds=bounds,
    )


def random_case(support: str, *, num_positions: int, num_vocab: int) -> Case:
    """Draw a teacher, and a student near it."""
    generator = torch.Generator().manual_seed(SEED)
    teacher_PV = 3 * torch.randn(num_positions, num_vocab, generator=generator)
    logits_PV = teacher_PV + torch.randn(num_positions, num_vocab, generator=generator)
    teacher_PV = teacher_PV.log_softmax(-1)
    if support == "full":
        return Case(logits_PV.requires_grad_(), None, teacher_PV)
    best = teacher_PV.topk(TOP_K)
    return Case(logits_PV.requires_grad_(), best.indices, best.values)


def our_losses(case: Case) -> Tensor:
    """Return the losses [P] as the trainer computes them."""
    return position_losses(
        case.logits_PV,
        teacher_ids_PK=case.teacher_ids_PK,
        teacher_logprobs_PK=case.teacher_logprobs_PK,
        loss=LossSection(support="full" if case.teacher_ids_PK is None else "top_k", top_k=TOP_K),
        num_vocab=case.logits_PV.shape[1],
    ).losses_P


def plain_losses(case: Case) -> Tensor:
    """Return KL(Q‖P) [P], written down as it is defined and left to autograd."""
    student_PV = case.logits_PV.log_softmax(-1)
    if case.teacher_ids_PK is None:
        return (student_PV.exp() * (student_PV - case.teacher_logprobs_PK)).sum(-1)
    student_PK = student_PV.gather(-1, case.teacher_ids_PK)
    student = torch.cat([student_PK, _log_tail(student_PK)], dim=-1)
    teacher = torch.cat([case.teacher_logprobs_PK, _log_tail(case.teacher_logprobs_PK)], dim=-1)
    return (student.exp() * (student - teacher)).sum(-1)


def peak_bytes_of(losses_of: Callable[[Case], Tensor], case: Case) -> int:
    """Return the most memory that a forward and a backward pass take beside their arguments."""
    case.logits_PV.grad = None
    with StorageMeter(*case) as meter:
        losses_of(case).sum().backward()
    peak_bytes: int = meter.peak_bytes
    return peak_bytes


@contextmanager
def one_thread() -> Iterator[None]:
    """Have torch compute on one thread in the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _run(case: Case, name: str) -> dict[str, float]:
    num_positions, num_vocab = case.logits_PV.shape
    ours_s, ours_P = _timed(our_losses, case)
    plain_s, plain_P = _timed(plain_losses, case)
    peak_bytes = peak_bytes_of(our_losses, case)
    values = {
        "tokens_per_s": num_positions / ours_s,
        "plain_tokens_per_s": num_positions / plain_s,
        "speedup_ratio": plain_s / ours_s,
        "read_s": _read_s(case.logits_PV.detach()),
        "peak_bytes": peak_bytes,
        "plain_peak_bytes": peak_bytes_of(plain_losses, case),
        "workspace_bytes": peak_bytes - num_positions * num_vocab * FLOAT32_BYTES,
        "loss_difference": float((ours_P - plain_P).abs().max()),
    }
    return {f"{name}.{key}": value for key, value in values.items()}


def _timed(losses_of: Callable[[Case], Tensor], case: Case) -> tuple[float, Tensor]:
    """Return the CPU time of a forward and a backward pass, and the losses."""
    case.logits_PV.grad = None
    began_s = thread_time()
    losses_P = losses_of(case)
    losses_P.sum().backward()
    return thread_time() - began_s, losses_P.detach()


def _read_s(logits_PV: Tensor) -> float:
    began_s = thread_time()
    logits_PV.sum()
    return thread_time() - began_s


def _log_tail(logprobs_PK: Tensor) -> Any:
    return torch.log1p(-logprobs_PK.exp().sum(-1, keepdim=True))
