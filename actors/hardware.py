"""What this machine's arithmetic units can do, found out without loading torch."""

import pathlib
from typing import Literal

DtypeName = Literal["float32", "bfloat16"]

_CPU_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})


def native_bfloat16() -> bool:
    """Say whether bfloat16 products are done in hardware: on an NVIDIA GPU, by AVX-512 or AMX.

    Elsewhere a CPU emulates them, slower than float32.
    """
    if pathlib.Path("/proc/driver/nvidia/version").exists():
        return True
    for line in pathlib.Path("/proc/cpuinfo").read_text(encoding="ascii").splitlines():
        if line.startswith("flags"):
            return not _CPU_FLAGS.isdisjoint(line.split())
    return False


def resolve_dtype(dtype: Literal["auto"] | DtypeName) -> DtypeName:
    """Return what ``auto`` means on this machine."""
    if dtype != "auto":
        return dtype
    return "bfloat16" if native_bfloat16() else "float32"
