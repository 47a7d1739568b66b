"""What this machine's arithmetic units can do, found out without loading torch."""

import pathlib
from typing import Literal

_NVIDIA_DRIVER = pathlib.Path("/proc/driver/nvidia")
DtypeName = Literal["float32", "bfloat16"]

_CPU_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})


def native_bfloat16() -> bool:
    """Say whether bfloat16 products are done in hardware: on an NVIDIA GPU, by AVX-512 or AMX.

    Elsewhere a CPU emulates them, slower than float32.
    """
    if (_NVIDIA_DRIVER / "version").exists():
        return True
    for line in pathlib.Path("/proc/cpuinfo").read_text(encoding="ascii").splitlines():
        if line.startswith("flags"):
            return not _CPU_FLAGS.isdisjoint(line.split())
    return False


def count_gpus(
    driver: pathlib.Path = _NVIDIA_DRIVER, devices: pathlib.Path = pathlib.Path("/dev")
) -> int:
    """Return the number of GPUs that NVIDIA's driver lists, or, if more, that are devices here.

    A container may have the devices without the driver's list.
    """
    return max(len(list((driver / "gpus").glob("*"))), len(list(devices.glob("nvidia[0-9]*"))))


def resolve_dtype(dtype: Literal["auto"] | DtypeName) -> DtypeName:
    """Return what ``auto`` means on this machine."""
    if dtype != "auto":
        return dtype
    return "bfloat16" if native_bfloat16() else "float32"
