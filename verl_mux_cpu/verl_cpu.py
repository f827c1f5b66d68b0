"""verl's platform "cpu": gloo, logical GPUs declared to Ray, host memory as device memory.

Imported after `verl.plugin.platform.platform_manager` (see verl_mux_cpu/plugin.py); registers at import. Runs in every process
that imports that module.
"""

from __future__ import annotations

import contextlib
import os
from types import ModuleType
from typing import Any

import psutil
import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

from verl_mux.platform.host_memory import room
from verl_mux_cpu import device_ledger


def _resident_bytes(*_args) -> int:
    return psutil.Process().memory_info().rss


def _free_and_total(*_args) -> tuple[int, int]:
    """Of the device with a budget, or of the host."""
    size, free = device_ledger.budget(), device_ledger.free()
    if size is not None and free is not None:
        return max(free, 0), size
    memory = room()
    return memory.available, memory.total


def _nothing(*_args, **_kwargs) -> None:
    return None


class _CpuDeviceModule(ModuleType):
    """`torch.cpu` with the memory and RNG functions that verl calls on every device module.

    "Allocated" is this process's resident memory: on a CPU the host's memory is the device's.
    """

    empty_cache = staticmethod(_nothing)
    ipc_collect = staticmethod(_nothing)
    reset_peak_memory_stats = staticmethod(_nothing)
    set_per_process_memory_fraction = staticmethod(_nothing)
    memory_allocated = staticmethod(_resident_bytes)
    memory_reserved = staticmethod(_resident_bytes)
    max_memory_allocated = staticmethod(_resident_bytes)
    max_memory_reserved = staticmethod(_resident_bytes)
    mem_get_info = staticmethod(_free_and_total)
    get_rng_state = staticmethod(lambda *_: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, *_: torch.set_rng_state(state))
    manual_seed = staticmethod(torch.manual_seed)
    manual_seed_all = staticmethod(torch.manual_seed)
    set_device = staticmethod(_nothing)
    get_device_name = staticmethod(lambda *_: "cpu")

    def __getattr__(self, name: str):
        return getattr(torch.cpu, name)


class CpuPlatform(PlatformBase):
    """One logical GPU is one Ray "GPU" resource; nothing is pinned unless a node names its CPUs."""

    _module = _CpuDeviceModule("verl_mux_cpu_device")
    # Variables that servers need; each engine's part for the CPU adds its own.
    engine_environment: dict[str, str] = {}

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> ModuleType:
        return self._module

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        # Never taken by verl's own probing: only by VERL_PLATFORM=cpu (see choose.py).
        return False

    def current_device(self) -> Any:
        # verl hands this to `tensor.to(...)`; an index would mean cuda:0.
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    set_device = synchronize = set_allocator_settings = empty_cache = profiler_start = profiler_stop = cudart = _nothing
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str):
        yield

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def rollout_env_vars(self) -> dict[str, str]:
        return dict(self.engine_environment)


def register() -> None:
    """Make `VERL_PLATFORM=cpu` known to verl. Idempotent."""
    if PlatformRegistry.get("cpu") is not CpuPlatform:
        PlatformRegistry.register(platform="cpu")(CpuPlatform)
    # Ray hides devices it did not assign; our logical GPUs need a value that verl can parse as a list of integers.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")


register()
