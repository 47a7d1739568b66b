# pyright: basic
"""A checksum of named tensors, the same on both sides of a weight transfer, at memory speed.

The bytes of a tensor are read as little-endian 64-bit words (the last one filled with zeros) and
summed modulo 2**64. The sum is multiplied by an odd number made of the tensor's name, so that two
tensors cannot change places unseen, and the products are summed. The order of tensors is free.
"""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

MODULUS = 2**64
WORD_BYTES = 8


def checksum_of(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return the checksum of (name, tensor) pairs as 16 hexadecimal digits."""
    checksum = Checksum()
    for name, tensor in tensors:
        checksum.add(name, tensor)
    return checksum.text()


class Checksum:
    """``checksum_of`` for tensors that come one by one."""

    def __init__(self) -> None:
        self._total = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Take in one tensor, on whatever device it lies."""
        factor = int.from_bytes(hashlib.sha256(name.encode()).digest()[:WORD_BYTES]) | 1
        self._total = (self._total + factor * (_sum_of_words(tensor) + 1)) % MODULUS

    def text(self) -> str:
        """Return the checksum of what was taken in so far."""
        return f"{self._total:016x}"


def _sum_of_words(tensor: Tensor) -> int:
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    num_whole = data.numel() // WORD_BYTES * WORD_BYTES
    words = data[:num_whole]
    if words.data_ptr() % WORD_BYTES:
        words = words.clone()
    rest = int.from_bytes(bytes(data[num_whole:].tolist()), "little")
    # int64 addition wraps modulo 2**64, as wanted.
    return (int(words.view(torch.int64).sum().item()) + rest) % MODULUS
