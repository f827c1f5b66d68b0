"""What device memory the processes of this host hold, by process and node: from NVIDIA's driver, or from the ledger where there
is no device. Where neither can say, that is said: "unknown"."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from verl_mux.coordinator.bus import members
from verl_mux.coordinator.bus.messages import Member, NodeHere, Source
from verl_mux.errors import UserError
from verl_mux.platform import device_ledger
from verl_mux.platform.choose import accelerator_present

# A node whose name is not known: of a host that is part of none, or before the coordinator has answered.
NO_NODE = ""


class Held(NamedTuple):
    """Bytes by pid and node, and those that no process is known for, by node."""

    by_pid: dict[int, dict[str, int]]
    others: dict[str, int]


class Devices(Protocol):
    source: Source

    def held(self, nodes: Mapping[str, NodeHere]) -> Held: ...


def open_devices(wanted: str) -> Devices:
    """`wanted`: auto, nvml, ledger or none. Raises UserError for another word, and for NVML that is asked for and not there."""
    if wanted in ("auto", "nvml"):
        try:
            return Nvml()
        except Exception as error:  # no package, no driver, no device: its words for each are its own
            if wanted == "nvml":
                raise UserError(f"--devices nvml: {error}; it takes NVIDIA's driver and `pip install nvidia-ml-py`") from error
    if wanted not in ("auto", "nvml", "ledger", "none"):
        raise UserError(f"--devices is {wanted!r}; allowed: auto, nvml, ledger, none")
    if wanted == "ledger" or (wanted == "auto" and not accelerator_present()):
        return Ledger()
    return Unknown()


class Unknown:
    source: Source = "unknown"

    def held(self, nodes: Mapping[str, NodeHere]) -> Held:
        return Held({}, {})


class Ledger:
    source: Source = "ledger"

    def held(self, nodes: Mapping[str, NodeHere]) -> Held:
        only = next(iter(nodes)) if len(nodes) == 1 else NO_NODE
        by_pid = {}
        for path, account in device_ledger.accounts(members.SPACE):
            if members.is_alive(Member(members.HOST, account.pid, account.started, members.BOOT, members.SPACE)):
                by_pid[account.pid] = {account.node or only: sum(account.tags.values())}
            else:
                with contextlib.suppress(OSError):  # it will not be read again
                    path.unlink()
        return Held(by_pid, {})


class Nvml:
    """Raises whatever its library does where that is not there, or cannot begin."""

    source: Source = "nvml"

    def __init__(self) -> None:
        import pynvml

        self._nvml: Any = pynvml
        pynvml.nvmlInit()
        self._cards = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]

    def held(self, nodes: Mapping[str, NodeHere]) -> Held:
        by_pid: defaultdict[int, dict[str, int]] = defaultdict(dict)
        others: dict[str, int] = {}
        for index, card in enumerate(self._cards):
            node = next((name for name, here in nodes.items() if here.gpu_ids is None or index in here.gpu_ids), NO_NODE)
            known = 0
            for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(card):
                used = process.usedGpuMemory or 0  # None: the driver does not tell, as in a container without its rights
                known += used
                by_pid[process.pid][node] = by_pid[process.pid].get(node, 0) + used
            used = self._nvml.nvmlDeviceGetMemoryInfo(card).used
            others[node] = others.get(node, 0) + max(used - known, 0)
        return Held(dict(by_pid), others)
