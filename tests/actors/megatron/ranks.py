# pyright: basic
"""Run a function as N gloo ranks, each a process forked from one that has Megatron imported."""

import multiprocessing
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any

import pytest

from opdkit.actors.megatron.settings import TrainerSettings

RANK_TIMEOUT_S = 120.0

PRELOADED = ["opdkit.actors.megatron.session", "tests.actors.megatron.micro"]

RankFunction = Callable[..., Any]


def run_ranks(function: RankFunction, settings: TrainerSettings, *arguments: object) -> list[Any]:
    """Return what ``function(session, *arguments)`` returns on every rank of the grid."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with pytest.MonkeyPatch.context() as patch:
        # The server of Python 3.11 imports with the environment's path, not with ours.
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        patch.setenv("PYTHONWARNINGS", "ignore")
        forkserver.ensure_running()
    world_size = settings.trainer.parallel.world_size
    first, *others = [context.Pipe() for _ in range(world_size)]
    pipes = [first, *others]
    processes = [
        context.Process(
            target=_run_rank, args=(theirs, rank, function, settings, arguments), name=f"rank{rank}"
        )
        for rank, (_, theirs) in enumerate(pipes)
    ]
    try:
        for process in processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()
        port = _receive(first[0])
        for ours, _ in others:
            ours.send((port, None))
        with ThreadPoolExecutor(world_size) as readers:
            return list(readers.map(_receive, [ours for ours, _ in pipes]))
    finally:
        for process in processes:
            process.join(timeout=5.0)
            process.kill()
            process.join()
            process.close()
        for ours, _ in pipes:
            ours.close()


def _receive(pipe: Connection) -> Any:
    if not pipe.poll(RANK_TIMEOUT_S):
        raise TimeoutError(f"a rank said nothing for {RANK_TIMEOUT_S} s")
    value, error = pipe.recv()
    if error:
        raise AssertionError(error)
    return value


def _run_rank(
    pipe: Connection,
    rank: int,
    function: RankFunction,
    settings: TrainerSettings,
    arguments: tuple[object, ...],
) -> None:
    warnings.simplefilter("ignore")
    # Imported here: the parent, pytest's process, stays free of Megatron.
    from opdkit.actors.megatron.meeting_point import open_store
    from opdkit.actors.megatron.session import MegatronSession

    try:
        port, timeout_s = 0, settings.collective_timeout_s
        if rank:
            port, _ = pipe.recv()
        world_size = settings.trainer.parallel.world_size
        store = open_store("127.0.0.1", port=port, world_size=world_size, timeout_s=timeout_s)
        if rank == 0:
            pipe.send((store.port, None))
        session = MegatronSession(settings, rank=rank, store=store)
        value = function(session, *arguments)
        session.close()
        pipe.send((value, None))
    except BaseException:  # noqa: BLE001 - reported to the parent, which fails the test
        pipe.send((None, f"rank {rank}:\n{traceback.format_exc()}"))
