# mypy: disable-error-code=no-untyped-call
# pyright: basic
# torch annotates neither its dispatch modes nor its storages.
"""How much memory torch's operations hold at once, exactly and on any device."""

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class StorageMeter(TorchDispatchMode):
    """Within its block, counts the bytes of tensors that are alive, besides those given.

    What an operation allocates and frees by itself is not seen.
    """

    def __init__(self, *given: Tensor | None) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._given = {_storage_id(tensor) for tensor in given if tensor is not None}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Perform the operation and take stock."""
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor) and _storage_id(tensor) not in self._given:
                storage = tensor.untyped_storage()
                self._alive[_storage_id(tensor)] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {key: kept for key, kept in self._alive.items() if not kept[0].expired()}
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._alive.values()))
        return result


def _storage_id(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key
