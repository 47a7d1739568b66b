# pyright: basic
"""What opdkit adds to a vLLM worker: new weights in place, and an end together with its owner.

vLLM imports this module in the engine's process, before the model is loaded, and mixes
``WorkerExtension`` into the worker. Its methods are called by ``collective_rpc``, between two
steps of the engine. This is the one module whose import acts, because vLLM offers no call that
early: in a process that ``multiprocessing`` started it begins to watch the parent, and keeps the
progress bars of loading from making a semaphore, which would outlive a process that is killed.
"""

import logging
import multiprocessing
import multiprocessing.connection
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm  # type: ignore[import-untyped]  # publishes no types
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from opdkit.actors.vllm.checkpoint_layout import difference, layout_of_file, layout_of_folder
from opdkit.actors.weight_checksum import checksum_of

logger = logging.getLogger(__name__)
reload_logger = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")


class WorkerExtension:
    """Mixed into vLLM's worker, whose attributes are declared here."""

    model_runner: Any
    model_config: Any
    vllm_config: Any

    def replace_weights(self, path: str, checksum: str) -> dict[str, str]:
        """Load a safetensors file with Hugging Face names in place of the current weights.

        Names, shapes and bytes are checked before anything is touched. Must not run while the
        scheduler is between two halves of a step: pause it.

        Returns:
            ``{"checksum": what the file's tensors add up to}``; or ``{"refusal": why}``, and then
            the engine has its old weights. (An exception would reach the caller as text only.)
        """
        try:
            tensors = dict(_read(Path(path)))
        except (OSError, SafetensorError) as error:
            return {"refusal": f"{path}: {error}"}
        expected = layout_of_folder(Path(self.model_config.model))
        if problem := difference(expected, layout_of_file(Path(path))):
            return {"refusal": f"{path}: {problem}"}
        read_checksum = checksum_of(tensors.items())
        if read_checksum != checksum:
            return {"refusal": f"{path}: checksum {read_checksum}, published {checksum}"}
        try:
            self._load(tensors)
        except BaseException:
            # Half of the layers are new. No rule says what such a model computes: end the engine,
            # so that its replica is replaced and starts from a whole set of weights.
            logger.exception("%s: loading broke off half-way", path)
            os._exit(1)
        return {"checksum": read_checksum}

    def _load(self, tensors: dict[str, torch.Tensor]) -> None:
        model = self.model_runner.get_model()
        # At each update it warns of layers that have no weights of their own: rotary embeddings,
        # and an output layer that is tied. The names were checked, and the latter is seen to.
        reload_logger.setLevel(logging.ERROR)
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)
            model.load_weights(iter(tensors.items()))
            finalize_layerwise_reload(model, self.model_config)
        for module in model.modules():
            # On a CPU the output layer multiplies by a packed copy of its weight. A layer that
            # is tied to the embedding has no weight of its own in the file, so the reload leaves
            # its copy as it was: pack it again.
            if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
                module.quant_method.process_weights_after_loading(module)


def _read(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            yield name, file.get_tensor(name)


def _end_with(parent: Any) -> None:
    """Wait for the owner's death (its end of a pipe closes, however it dies), then end at once."""
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


def _live_and_die_with_owner() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        tqdm.set_lock(threading.RLock())
        threading.Thread(
            target=_end_with, args=(parent,), daemon=True, name="opdkit-owner-watch"
        ).start()


_live_and_die_with_owner()
