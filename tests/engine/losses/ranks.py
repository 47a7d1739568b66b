# mypy: disable-error-code=no-untyped-call
# pyright: basic
# torch annotates its process groups in part.
"""Runs a function on several processes that share a gloo group."""

import multiprocessing
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist

Result = TypeVar("Result")
ROOT = Path(__file__).parents[3]
DEADLINE_S = 50


def run_ranks(
    function: Callable[..., Result], *args: Any, num_ranks: int, store: Path
) -> list[Result]:
    """Return what ``function(group, *args)`` returns on each of ``num_ranks`` ranks.

    The processes are forked from a clean one that has imported torch and used it for nothing:
    neither this process's threads nor its accelerators get in the way.

    Args:
        function: of a module under tests/.
        args: plain values; tensors would travel through shared memory.
        num_ranks: size of the group.
        store: path of a file that does not exist; the ranks meet there.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "pytest"])
    with (
        pytest.MonkeyPatch.context() as patch,
        ProcessPoolExecutor(num_ranks, mp_context=context) as pool,
    ):
        patch.syspath_prepend(ROOT)
        # A rank waits for the others to join, so no process takes two.
        futures = [
            pool.submit(_run_rank, function, args, rank, num_ranks, store)
            for rank in range(num_ranks)
        ]
        return [future.result(DEADLINE_S) for future in futures]


def _run_rank(
    function: Callable[..., Result], args: tuple[Any, ...], rank: int, num_ranks: int, store: Path
) -> Result:
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=store.as_uri(),
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=DEADLINE_S),
    )
    try:
        return function(dist.group.WORLD, *args)
    finally:
        dist.destroy_process_group()
