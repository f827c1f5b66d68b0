"""verl's training engine where the platform says that the device is CUDA, on a machine that has none."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("verl")


class Device:
    """A device module that writes down what was called, in order; this process has `held` of its `size` bytes."""

    def __init__(self, calls):
        self.calls, self.held, self.size = calls, 0, 1 << 40

    def memory_allocated(self):
        return self.held

    def mem_get_info(self):
        self.calls.append("mem_get_info")
        return self.size - self.held, self.size

    def list_gpu_processes(self):
        return "process 7 uses 9 MB"

    def synchronize(self):
        self.calls.append("synchronize")

    def empty_cache(self):
        self.calls.append("empty_cache")


class Cuda:
    """`calls`: what was called of the device and of engines. `bytes_each`: of an engine's states."""

    def __init__(self):
        self.calls, self.bytes_each = [], 100
        self.device = Device(self.calls)

    def engine(self, role=None, **config):
        """One of verl's, whose states lie on the device. Its calls are told with its role, or with what of it was moved."""
        from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

        cuda = self

        class Engine(FSDPEngine):
            def __init__(self):
                self.module = torch.nn.Linear(2, 2)
                self.engine_config = SimpleNamespace(**{"forward_only": False, "offload_policy": False, **config})
                self._is_offload_param = self._is_offload_optimizer = not any(config.values())
                self.here = False
                self.place(True)

            def place(self, here):
                cuda.device.held += cuda.bytes_each * (here - self.here)
                self.here = here

            def to(self, device, model=True, optimizer=True, grad=True):
                if model or optimizer:
                    cuda.calls.append((role, device) if role else (device, model, optimizer))
                    self.place(device != "cpu")

        return Engine()


@pytest.fixture
def cuda(monkeypatch):
    from verl.workers.engine import base

    from verl_mux.trainer import workers

    made = Cuda()
    for where in (workers, base):
        monkeypatch.setattr(where, "get_device_name", lambda: "cuda")
    monkeypatch.setattr(workers, "get_torch_device", lambda: made.device)
    assert callable(torch._C._host_emptyCache)
    monkeypatch.setattr(workers, "_empty_host_cache", lambda: made.calls.append("empty_host_cache"))
    return made
