# pyright: basic
"""Let Megatron-Core run on a machine without CUDA.

Megatron-Core 0.16 names its device in four ways: ``torch.cuda.current_device()``, the literal
``"cuda"``, ``tensor.cuda()`` and type names such as ``torch.cuda.FloatTensor``. ``enable`` answers
the first and gives Megatron a random-state tracker over the CPU's generator; ``device_mode``,
entered around Megatron's calls, answers the others. Where CUDA is present both do nothing.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import random as megatron_random
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


def enable() -> None:
    """Prepare this process for Megatron-Core. Idempotent; call before a model is built."""
    if torch.cuda.is_available() or isinstance(
        megatron_random._CUDA_RNG_STATE_TRACKER, CpuStateTracker
    ):
        return
    # Names that torch and Megatron declare with CUDA types: mypy cannot like what replaces them.
    cuda: Any = torch.cuda
    tracking: Any = megatron_random
    cuda.current_device = lambda: CPU
    cuda.synchronize = lambda device=None: None
    tracking._CUDA_RNG_STATE_TRACKER = CpuStateTracker()
    tracking._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    tracking._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    tracking._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


def device_mode() -> contextlib.AbstractContextManager[object]:
    """Return the context in which Megatron's calls are made. It holds for the calling thread."""
    return contextlib.nullcontext() if torch.cuda.is_available() else _CudaMeansCpu()


class _CudaMeansCpu(TorchFunctionMode):
    """Inside, ``device="cuda"`` is the CPU, and a CPU tensor's type name is a CUDA one."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Modes nest, and then see a name that is already translated.
            return "torch.cuda." + func(*args).rpartition(".")[2]
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return func(*args, **kwargs)


class CpuStateTracker(megatron_random.CudaRNGStatesTracker):  # type: ignore[misc]  # untyped base
    """Megatron's named random states, kept for the CPU's generator."""

    def add(self, name: str, seed: int) -> None:
        """Start a state; a name or seed in use is refused, as by the base class."""
        if name in self.states_ or seed in self.seeds_:
            raise ValueError(f"random state {name!r} or seed {seed} is already in use")
        self._is_initialized = True
        self.seeds_.add(seed)
        self.states_[name] = torch.Generator().manual_seed(seed).get_state()

    @contextlib.contextmanager
    def fork(self, name: str = megatron_random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        """Draw from the named state within, and from the ordinary one again afterwards."""
        ordinary = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(ordinary)
