# pyright: basic
"""The checksum that trainer and engine compute independently."""

import torch

from opdkit.actors.weight_checksum import checksum_of


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "a": torch.randn(33, 5, generator=generator),
        "b": torch.randn(7, generator=generator).bfloat16(),
        "c": torch.zeros(0),
        "d": torch.randn(4, 4, generator=generator),
        "e": torch.randn(4, 4, generator=generator),
    }


def test_order_and_layout_in_memory_do_not_matter() -> None:
    there = tensors()
    here = {name: there[name] for name in reversed(there)}
    here["d"] = there["d"].t().contiguous().t()
    here["a"] = torch.cat((torch.zeros(1), there["a"].flatten()))[1:].view(33, 5)
    assert checksum_of(there.items()) == checksum_of(here.items())
    assert len(checksum_of(there.items())) == 16


def test_a_changed_missing_or_exchanged_tensor_shows() -> None:
    whole = checksum_of(tensors().items())
    changed = tensors()
    changed["b"].view(torch.int16)[6] ^= 1
    assert checksum_of(changed.items()) != whole
    exchanged = tensors()
    exchanged["d"], exchanged["e"] = exchanged["e"], exchanged["d"]
    assert checksum_of(exchanged.items()) != whole
    for name in tensors():
        missing = tensors()
        del missing[name]
        assert checksum_of(missing.items()) != whole


def test_the_value_is_that_of_the_definition() -> None:
    import hashlib

    words = torch.tensor([3, -1, 2**62], dtype=torch.int64)
    factor = int.from_bytes(hashlib.sha256(b"w").digest()[:8]) | 1
    expected = factor * (3 + (2**64 - 1) + 2**62 + 1) % 2**64
    assert checksum_of([("w", words)]) == f"{expected:016x}"
