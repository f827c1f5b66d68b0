"""SGLang's memory-saver adapter, with every tag's bytes reported; that of verl_mux_cpu where there is no GPU.

Hooked around `TorchMemorySaverAdapter.create` in the scheduler processes of engines that our replicas launch (see plugin.py).
On CUDA the work stays with torch_memory_saver.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from verl_mux.memory import tag_report
from verl_mux.memory.metered import Metered
from verl_mux.platform.choose import cpu_part

_mapped: dict[str, int] = {}  # bytes that this process has on the device, by tag
sizes: dict[str, int] = {}  # the same while all is awake: what a wake needs


_cuda: Metered | None = None


def create_adapter(original, *args: Any, **kwargs: Any):
    """AROUND hook: the adapter SGLang would use, metered; ours on a machine without CUDA."""
    enable = kwargs.get("enable", args[-1] if args else False)
    if not enable:
        return original(*args, **kwargs)
    if not torch.cuda.is_available():
        return cpu_part("engine_saver")(_report)
    global _cuda
    # SGLang asks for one adapter a pool; pauses are of the process.
    _cuda = _cuda or Metered(original(*args, **kwargs), CudaDevice(), _report)
    return _cuda


def _report(tag: str, mapped: int) -> None:
    _mapped[tag] = mapped
    sizes[tag] = max(sizes.get(tag, 0), mapped)
    tag_report.write(_mapped, os.getpid())


class CudaDevice:
    """The device of this process, as `Metered` asks for it."""

    def free(self) -> int:
        return torch.cuda.mem_get_info()[0]

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def collect(self) -> None:
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()
