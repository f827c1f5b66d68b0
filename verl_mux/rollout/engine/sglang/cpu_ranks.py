"""Several ranks of one SGLang engine on the CPU."""

from __future__ import annotations

import os


def environment(ranks: int) -> dict[str, str]:
    """What the engine needs in it. SGLang asks for a NUMA node for each rank, or for cores by name, and takes the CPU for a GPU
    where NCCL's library is installed."""
    if ranks == 1:
        return {}
    cores = sorted(os.sched_getaffinity(0))
    shares = [cores[rank::ranks] or [cores[rank % len(cores)]] for rank in range(ranks)]
    return {
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, share)) for share in shares),
        "SGLANG_NCCL_SO_PATH": "none",
    }
