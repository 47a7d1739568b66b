# pyright: basic
"""Safetensors files: read by name across a model folder, and written tensor by tensor.

Written here rather than by the library, which wants all tensors in memory at once.
"""

import contextlib
import dataclasses
import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open
from torch import Tensor

from opdkit.actors.weight_checksum import Checksum
from opdkit.protocols.errors import ConfigError

DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
HEADER_ALIGNMENT = 8


class FolderTensors(Mapping[str, Tensor]):
    """Tensors of all ``*.safetensors`` files in a folder, read from the disk when asked for."""

    def __init__(self, folder: str | Path) -> None:
        paths = sorted(Path(folder).glob("*.safetensors"))
        if not paths:
            raise ConfigError(f"student.model: no *.safetensors file in {folder}")
        self._files = contextlib.ExitStack()
        # safetensors has no annotations for what safe_open returns.
        self._by_name: dict[str, Any] = {}
        for path in paths:
            file = self._files.enter_context(safe_open(str(path), framework="pt"))
            self._by_name.update(dict.fromkeys(file.keys(), file))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._by_name.clear()
        self._files.close()

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._by_name[name].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorShape:
    """What the head of a file says of one tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of its data."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclasses.dataclass(frozen=True, kw_only=True)
class WrittenFile:
    """A complete file."""

    num_bytes: int
    checksum: str
    """``checksum_of`` its tensors."""


def write_tensors(
    path: Path, shapes: Sequence[TensorShape], tensors: Iterable[tuple[str, Tensor]]
) -> WrittenFile:
    """Write a safetensors file; it has its name only when it is complete.

    ``tensors`` come in the order of ``shapes``, one in memory at a time.
    """
    head = _encode_head(shapes)
    checksum = Checksum()
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(head)
            for shape, (name, tensor) in zip(shapes, tensors, strict=True):
                actual = TensorShape(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape))
                if actual != shape:
                    raise ValueError(f"the next tensor of {path} should be {shape}, got {actual}")
                flat = tensor.detach().contiguous().cpu().reshape(-1)
                checksum.add(name, flat)
                file.write(flat.view(torch.uint8).numpy().data)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return WrittenFile(num_bytes=os.path.getsize(path), checksum=checksum.text())


def _encode_head(shapes: Sequence[TensorShape]) -> bytes:
    """Encode the length-prefixed JSON that a safetensors file begins with."""
    # transformers refuses a file that does not say which framework wrote it.
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for shape in shapes:
        end = offset + shape.num_bytes
        entries[shape.name] = {
            "dtype": DTYPE_NAMES[shape.dtype],
            "shape": shape.shape,
            "data_offsets": (offset, end),
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT)
    return struct.pack("<Q", len(text)) + text
