"""What a GPU (or a CPU core that stands for one) can do, as far as phase times depend on it."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from verl_mux.errors import UserError


class GpuKind(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """tflops: dense bf16 peak. tb_per_s: memory bandwidth. memory_gb: on the device. usd_per_gpu_hour: rent.

    decode, train: share of bandwidth and peak that generation, and of the peak that training, reaches at least. For GPUs the
    lowest seen in the paper's jobs (table 3: 7B, 14B, 32B on H20 and H800), so that estimates from them are bounds: of decoding
    as if all responses had their maximum, which the longest of a batch has; of training by the tokens that there really were,
    with mean responses as in its figure 11 (7B with at most 8K tokens: 1,206). process_gb: host memory of one process per GPU,
    besides the model's states. fixed_s: what a phase takes however little it computes.
    """

    tflops: float
    tb_per_s: float
    memory_gb: float = 80.0
    usd_per_gpu_hour: float = 0.0
    decode: float = 0.30
    train: float = 0.041
    process_gb: float = 14.0
    fixed_s: float = 2.0

    def __post_init__(self) -> None:
        for name in ("tflops", "tb_per_s", "memory_gb", "decode", "train"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"GPU kind: {name} is {getattr(self, name):g}; it must be above 0 and finite")
        for name in ("usd_per_gpu_hour", "process_gb", "fixed_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"GPU kind: {name} is {getattr(self, name):g}; it must be at least 0 and finite")


# H20, H800: RollMux (arXiv 2512.11306v2), table 1. H100, H200: NVIDIA's data sheets of the SXM ones; they name no rent.
GPU_KINDS: dict[str, GpuKind] = {
    "H20": GpuKind(tflops=148.0, tb_per_s=4.0, memory_gb=96.0, usd_per_gpu_hour=1.85),
    "H800": GpuKind(tflops=989.5, tb_per_s=3.35, memory_gb=80.0, usd_per_gpu_hour=5.28),
    "H100": GpuKind(tflops=989.4, tb_per_s=3.35, memory_gb=80.0),
    "H200": GpuKind(tflops=989.4, tb_per_s=4.8, memory_gb=141.0),
}


def find_kind(name: str, given: dict[str, GpuKind]) -> GpuKind:
    """A kind of the user's own, or one of ours. Raises UserError."""
    kinds = {**GPU_KINDS, **given}
    if name not in kinds:
        raise UserError(f"GPU kind {name!r} is not known; allowed: {', '.join(kinds)}, or one given under `kinds`")
    return kinds[name]


def with_given(given: Mapping[str, Mapping[str, float]]) -> dict[str, GpuKind]:
    """All kinds of the table, and those of a file, of which what is left out is as in the table, where they stand there. Raises
    UserError."""
    kinds = dict(GPU_KINDS)
    for name, said in given.items():
        known = msgspec.structs.asdict(kinds[name]) if name in kinds else {}
        try:
            kinds[name] = msgspec.convert({**known, **said}, GpuKind)
        except msgspec.ValidationError as error:
            allowed = ", ".join(GpuKind.__struct_fields__)
            raise UserError(f"kinds.{name}: {error}; allowed: {allowed}, of which {', '.join(GPU_KINDS)} have all") from None
    return kinds
