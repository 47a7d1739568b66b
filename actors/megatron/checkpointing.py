# pyright: basic
"""Save and restore a rank's model, optimizer, schedule and random states.

The files are Megatron's distributed checkpoint: one directory for all ranks, loadable with
another number of ranks. Random states are restored where the tensor-parallel size is the same.
"""

import functools
import queue
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from opdkit.actors.megatron.model import Student
from opdkit.protocols.errors import ConfigError


def save_checkpoint(student: Student, path: str) -> None:
    """Write a new directory; every rank calls.

    Raises:
        FileExistsError: the directory exists and is not empty.
    """
    folder = Path(path)
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise FileExistsError(f"checkpoint folder {path} is not empty")
    dist.barrier()
    # Megatron would start a server process for this queue, seconds at the first save and an orphan
    # when the rank is killed. A save that waits for its writer needs no more than a plain queue.
    filesystem_async._results_queue = filesystem_async._results_queue or queue.Queue()
    strategy = InProcessSave("torch_dist", 1, thread_count=1)
    dist_checkpointing.save(_sharded_state(student, is_loading=False), path, strategy)


class InProcessSave(TorchDistSaveShardedStrategy):  # type: ignore[misc]  # publishes no types
    """Megatron's strategy, but the calling thread writes.

    Megatron forks a process for each file and waits for its answer without a deadline. A rank has
    many threads, Ray's among them: a fork of it dies now and then before it says a word, and the
    save would wait forever.
    """

    def _get_save_and_finalize_callbacks(
        self, writer: FileSystemWriterAsync, save_state_dict_ret: Any
    ) -> AsyncRequest:
        request = super()._get_save_and_finalize_callbacks(writer, save_state_dict_ret)
        if request.async_fn is None:  # nothing to write on this rank
            return request
        return request._replace(async_fn=functools.partial(_write, writer))


def _write(
    writer: FileSystemWriterAsync, _rank: int, buckets: list[Any], results: queue.Queue[Any]
) -> None:
    """Write each file, and hand over what Megatron's own function would: results by file."""
    transforms = [writer.transforms] if hasattr(writer, "transforms") else []
    written: queue.Queue[Any] = queue.Queue()
    for number, bucket in enumerate(buckets):
        pending: queue.Queue[int] = queue.Queue()
        pending.put(number)
        writer.write_preloaded_data(transforms, number, bucket, written, pending, use_fsync=True)
    by_file = dict(written.get() for _ in buckets)
    errors = [result for result in by_file.values() if isinstance(result, Exception)]
    results.put(errors[0] if errors else by_file)


def load_checkpoint(student: Student, path: str) -> None:
    """Restore what ``save_checkpoint`` wrote; every rank calls.

    Raises:
        ConfigError: there is no checkpoint at ``path``.
    """
    if not dist_checkpointing.check_is_distributed_checkpoint(path):
        raise ConfigError(f"{path} holds no complete trainer checkpoint")
    wanted = _sharded_state(student, is_loading=True)
    if (
        dist_checkpointing.load_common_state_dict(path)["tensor_parallel"]
        != wanted["tensor_parallel"]
    ):
        del wanted["random"]
    # Annotated as if it could return a list of files too.
    state: Any = dist_checkpointing.load(wanted, path)
    student.model.module.load_state_dict(state["model"])
    student.optimizer.load_state_dict(state["optimizer"])
    # The schedule adds the saved number of steps to its own.
    student.schedule.num_steps = 0
    student.schedule.load_state_dict(state["schedule"])
    if "random" in state:
        torch.set_rng_state(state["random"]["torch"])
        _tracker().set_states(state["random"]["megatron"])


def _sharded_state(student: Student, *, is_loading: bool) -> dict[str, Any]:
    metadata = {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
    model = student.model.module.sharded_state_dict(metadata=metadata)
    return {
        "model": model,
        "optimizer": student.optimizer.sharded_state_dict(
            model, is_loading=is_loading, metadata=metadata
        ),
        "schedule": student.schedule.state_dict(),
        "tensor_parallel": parallel_state.get_tensor_model_parallel_world_size(),
        "random": _random_states(),
    }


def _random_states() -> ShardedObject:
    """Return one entry a tensor-parallel rank: data-parallel ranks draw alike."""
    return ShardedObject(
        "random",
        {"torch": torch.get_rng_state(), "megatron": _tracker().get_states()},
        (parallel_state.get_tensor_model_parallel_world_size(),),
        (parallel_state.get_tensor_model_parallel_rank(),),
        replica_id=parallel_state.get_data_parallel_rank(),
    )


def _tracker() -> Any:
    """Return Megatron's named random states; its annotation allows for none."""
    return get_cuda_rng_tracker()
