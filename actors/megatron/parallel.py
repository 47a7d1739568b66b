# pyright: basic
"""The process grid: who belongs to which tensor- and data-parallel group."""

import datetime

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from opdkit.actors.megatron import cpu_support
from opdkit.protocols.config import ParallelSection


def open_store(host: str, *, port: int, world_size: int, timeout_s: float) -> dist.TCPStore:
    """Open the meeting point of the ranks: port 0 starts it on a free port, else connect to it."""
    return dist.TCPStore(
        host,
        port,
        world_size,
        is_master=port == 0,
        timeout=datetime.timedelta(seconds=timeout_s),
        wait_for_workers=False,
    )


def join(
    store: dist.Store, *, rank: int, parallel: ParallelSection, seed: int, timeout_s: float
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


def leave() -> None:
    """Give the place up."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
