# pyright: basic
"""The process grid: who belongs to which tensor- and data-parallel group."""

import datetime
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch.distributed import Store  # type: ignore[attr-defined]  # not in its __all__

from opdkit.actors.megatron import cpu_support
from opdkit.protocols.config import ParallelSection


def join(
    store: Store, *, rank: int, parallel: ParallelSection, seed: int, timeout_s: float
) -> None:
    """Take a place in the grid. Consecutive ranks are one tensor-parallel group."""
    cpu_support.enable()
    dist.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo",
        store=store,
        rank=rank,
        world_size=parallel.world_size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor, create_gloo_process_groups=False
    )
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def tensor_group() -> dist.ProcessGroup:
    """Return this rank's tensor-parallel group."""
    # Megatron's annotation allows for a rank that is in none.
    group: Any = parallel_state.get_tensor_model_parallel_group()
    assert isinstance(group, dist.ProcessGroup)
    return group


def leave() -> None:
    """Give the place up."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
