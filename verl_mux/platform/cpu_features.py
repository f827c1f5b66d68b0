"""What this machine's CPU can do."""

from __future__ import annotations


def has_bf16_products() -> bool:
    """Whether the CPU multiplies bf16 matrices itself (AVX512-BF16 or AMX); torch emulates it elsewhere, 30 times slower."""
    import torch

    found = torch.cpu.get_capabilities()
    return bool(found.get("avx512_bf16") or found.get("amx_bf16"))
