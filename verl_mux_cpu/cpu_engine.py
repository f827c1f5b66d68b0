"""SGLang on the CPU: the environment of several ranks, and its memory-saver adapter over our saver.

Runs in an engine server and its schedulers; called by verl_mux/rollout/engine/sglang through entry points.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from verl_mux_cpu.cpu_saver import cpu_memory_saver


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


class SavingAdapter:
    """The CPU saver behind SGLang's adapter interface."""

    enabled = True

    def __init__(self, report: Callable[[str, int], None]) -> None:
        """`report(tag, bytes)`: called after each move."""
        self._report = report

    def check_validity(self, caller_name: str) -> None:
        return None

    @contextlib.contextmanager
    def configure_subprocess(self):
        # torch_memory_saver's preload library needs libcuda: every child would exit with 127.
        yield

    @contextlib.contextmanager
    def region(self, tag: str, enable_cpu_backup: bool = False):
        with cpu_memory_saver.region(tag, enable_cpu_backup):
            yield
        self._report(tag, cpu_memory_saver.mapped_bytes()[tag])

    @contextlib.contextmanager
    def cuda_graph(self, **kwargs):
        yield

    @contextlib.contextmanager
    def disable(self):
        yield

    def pause(self, tag: str) -> None:
        self._report(tag, cpu_memory_saver.pause(tag).mapped)

    def resume(self, tag: str) -> None:
        if self.is_paused(tag):  # as on CUDA, it may be asked twice
            self._report(tag, cpu_memory_saver.resume(tag).mapped)

    def is_paused(self, tag: str) -> bool:
        return cpu_memory_saver.is_paused(tag)
