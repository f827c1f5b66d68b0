"""SGLang's memory-saver adapter, with every tag's bytes and seconds reported, and our saver where there is no GPU.

Hooked around `TorchMemorySaverAdapter.create` in the scheduler processes of engines that our replicas launch (see
platform/sglang_plugin.py). On CUDA the work stays with torch_memory_saver.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

import torch

from verl_mux.memory.cpu_saver import cpu_memory_saver
from verl_mux.memory.tag_report import TagReport

_report = TagReport(pid=os.getpid())


def create_adapter(original, *args: Any, **kwargs: Any):
    """AROUND hook: the adapter SGLang would use, metered; ours on a machine without CUDA."""
    enable = kwargs.get("enable", args[-1] if args else False)
    if not enable:
        return original(*args, **kwargs)
    return MeteredCuda(original(*args, **kwargs)) if torch.cuda.is_available() else MeteredCpu()


def _record(tag: str, mapped: int, started: float) -> None:
    _report.pid = os.getpid()
    _report.mapped[tag] = mapped
    _report.seconds[tag] = time.perf_counter() - started
    _report.write()


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
        _record(tag, cpu_memory_saver.mapped_bytes()[tag], time.perf_counter())

    @contextlib.contextmanager
    def cuda_graph(self, **kwargs):
        yield

    @contextlib.contextmanager
    def disable(self):
        yield

    def pause(self, tag: str) -> None:
        started = time.perf_counter()
        cpu_memory_saver.pause(tag)
        _record(tag, cpu_memory_saver.mapped_bytes()[tag], started)

    def resume(self, tag: str) -> None:
        started = time.perf_counter()
        cpu_memory_saver.resume(tag)
        _record(tag, cpu_memory_saver.mapped_bytes()[tag], started)


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
        held = _report.mapped.get(tag, 0) + max(0, before - torch.cuda.mem_get_info()[0])
        _record(tag, held, time.perf_counter())

    def pause(self, tag: str) -> None:
        started = time.perf_counter()
        self._inner.pause(tag)
        _record(tag, 0, started)

    def resume(self, tag: str) -> None:
        started, before = time.perf_counter(), torch.cuda.mem_get_info()[0]
        self._inner.resume(tag)
        _record(tag, max(0, before - torch.cuda.mem_get_info()[0]), started)
