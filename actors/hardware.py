# pyright: basic
"""What this machine's arithmetic units can do."""

import torch


def native_bfloat16() -> bool:
    """Say whether bfloat16 products are done in hardware: on the GPU, or by AVX-512 or AMX.

    Elsewhere a CPU emulates them, slower than float32.
    """
    if torch.cuda.is_available():
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    flags = torch.cpu.get_capabilities()
    return bool(flags.get("avx512_bf16") or flags.get("amx_bf16"))
