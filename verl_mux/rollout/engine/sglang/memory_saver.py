"""SGLang's memory-saver adapter, with every tag's bytes reported, and our saver where there is no GPU.

Hooked around `TorchMemorySaverAdapter.create` in the scheduler processes of engines that our replicas launch (see plugin.py).
On CUDA the work stays with torch_memory_saver.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch

from verl_mux.memory import tag_report
from verl_mux.memory.cpu_saver import cpu_memory_saver

_mapped: dict[str, int] = {}  # bytes that this process has on the device, by tag


def create_adapter(original, *args: Any, **kwargs: Any):
    """AROUND hook: the adapter SGLang would use, metered; ours on a machine without CUDA."""
    enable = kwargs.get("enable", args[-1] if args else False)
    if not enable:
        return original(*args, **kwargs)
    return MeteredCuda(original(*args, **kwargs)) if torch.cuda.is_available() else MeteredCpu()


def _report(tag: str, mapped: int) -> None:
    _mapped[tag] = mapped
    tag_report.write(_mapped, os.getpid())


class MeteredCpu:
    """The CPU saver behind SGLang's adapter interface."""

    enabled = True

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
        _report(tag, cpu_memory_saver.mapped_bytes()[tag])

    @contextlib.contextmanager
    def cuda_graph(self, **kwargs):
        yield

    @contextlib.contextmanager
    def disable(self):
        yield

    def pause(self, tag: str) -> None:
        _report(tag, cpu_memory_saver.pause(tag).mapped)

    def resume(self, tag: str) -> None:
        _report(tag, cpu_memory_saver.resume(tag).mapped)


class MeteredCuda:
    """torch_memory_saver's adapter; bytes are what the device's free memory changed by."""

    def __init__(self, inner) -> None:
        self._inner = inner

    def __getattr__(self, name: str):
        return getattr(self._inner, name)

    @contextlib.contextmanager
    def region(self, tag: str, enable_cpu_backup: bool = False):
        before = torch.cuda.mem_get_info()[0]
        with self._inner.region(tag=tag, enable_cpu_backup=enable_cpu_backup):
            yield
        _report(tag, _mapped.get(tag, 0) + max(0, before - torch.cuda.mem_get_info()[0]))

    def pause(self, tag: str) -> None:
        self._inner.pause(tag)
        _report(tag, 0)

    def resume(self, tag: str) -> None:
        before = torch.cuda.mem_get_info()[0]
        self._inner.resume(tag)
        _report(tag, max(0, before - torch.cuda.mem_get_info()[0]))
